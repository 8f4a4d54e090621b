"""Linear weights in the layouts of the C++ kernels (model/ops/cpu/cpp/linear.h): how each is stored, and the
packing."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from model.config.tensors import LinearRole
from model.host.huge_pages import HugePageMemory
from model.ops.cpu.records import PackedWeightRecord
from model.ops.interface import PackedForm
from model.precision import FEW_BITS_SHARE, GROUP

# "exact" keeps weights as they are, in bfloat16 where that loses nothing (half the bytes to read), else in
# float32. The others round: to bfloat16; to int8 in groups of 32 inputs; to int4 likewise, but the head,
# whose errors are the logits' own, to int8. What comes from 4 or 5 bits and is to be int8 becomes "int5",
# which loses nothing by it: 4 or 5 bits where they hold the values, 8 elsewhere. Few-bit weights are
# multiplied by inputs of 8 bits, int8 ones by inputs of 16.
WeightStorage = Literal["exact", "float32", "bfloat16", "int8", "int4"]
_KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int5": 3, "int4": 3}
# What the kernel for a kind of weights multiplies, both weights and inputs being widened or rounded to it.
Factor = Literal["float32", "int16", "int8"]
FACTORS: Mapping[int, Factor] = {0: "float32", 1: "float32", 2: "int16", 3: "int8"}
_ELEMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """A head in 4 bits, from which each logit is estimated and bounded (cpp/greedy.cpp)."""

    weight: "PackedWeight"
    spreads: torch.Tensor  # float32 [panels, sketch_spreads]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.spreads.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in the kernels' own layout."""

    out_features: int
    in_features: int
    storage: str  # "float32", "bfloat16", "int8", "int5" or "int4"
    data: torch.Tensor
    scales: torch.Tensor | None
    descriptor: PackedWeightRecord
    address: int  # address of the descriptor
    sketch: Sketch | None = None  # only heads have one: for ``Ops.greedy``

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.scales, self.sketch) if part is not None)

    @property
    def kind(self) -> int:
        """Of the kernel that multiplies by it."""
        return _KINDS[self.storage]

    @property
    def factor(self) -> Factor:
        """What that kernel multiplies."""
        return FACTORS[self.kind]


def choose_storage(weight: torch.Tensor, wanted: WeightStorage, role: LinearRole) -> str:
    """Choose the form in which a weight [out_features, in_features] is packed. A weight whose inputs do not
    divide into whole groups is not quantised."""
    if wanted in ("int8", "int4") and weight.shape[1] % GROUP == 0:
        return "int8" if role == "head" else wanted
    if wanted in ("float32", "bfloat16"):
        return wanted
    return "bfloat16" if weight.dtype == torch.bfloat16 or _fits_bfloat16(weight) else "float32"


def pack_weight(
    library: ctypes.CDLL,
    memory: HugePageMemory,
    weight: torch.Tensor,
    storage: str,
    *,
    may_be_int5: bool = False,
) -> PackedWeight:
    """Pack a weight [out_features, in_features] of float32 or bfloat16.

    ``may_be_int5``: instead of int8, where five bits hold most of it exactly.
    """
    source = weight.contiguous()
    forms = None
    if storage == "int4":
        forms = _four_bits(library, source.shape[0])
    elif storage == "int8" and may_be_int5:
        forms = _forms_needed(library, source)
        storage = "int8" if forms is None else "int5"
    data, scales = _room(library, memory, source.shape, storage, forms)
    packed = _described(source.shape[0], source.shape[1], storage, data, scales)
    library.pack_linear(
        packed.address, source.data_ptr(), int(source.dtype == torch.bfloat16), torch.get_num_threads()
    )
    return packed


def pack_head(
    library: ctypes.CDLL, memory: HugePageMemory, weight: torch.Tensor, storage: str
) -> PackedWeight:
    """Pack a head like ``pack_weight``, and make a sketch of it where it is int8."""
    packed = pack_weight(library, memory, weight, storage)
    if storage != "int8":
        return packed
    out_features, in_features = weight.shape
    forms = _four_bits(library, out_features)
    data, _ = _room(library, memory, weight.shape, "int4", forms)
    spreads = torch.empty(len(forms), library.sketch_spreads(in_features))
    sketch = Sketch(_described(out_features, in_features, "int4", data, None), spreads)
    library.pack_sketch(
        sketch.weight.address, sketch.spreads.data_ptr(), packed.address, torch.get_num_threads()
    )
    return replace(packed, sketch=sketch)


def products_per_row(library: ctypes.CDLL, weight: PackedWeight) -> int:
    """Multiplications that a row of inputs takes. Where most of a weight has few bits, the panels of 8 bits
    are multiplied in halves, one after the other (cpp/few_bits.h)."""
    count = weight.out_features * weight.in_features
    if weight.factor != "int8":
        return count
    num_panels: int = library.few_bits_panels(weight.out_features)
    places = weight.data[: 8 * (num_panels + 1)].view(torch.int64)
    in_halves = library.few_bits_panel_bytes(weight.in_features, library.few_bits_form(8, False))
    return count + count * int((places.diff() == in_halves).sum()) // num_panels


def _four_bits(library: ctypes.CDLL, out_features: int) -> torch.Tensor:
    """The forms of panels that all have 4 bits, uint8 [panels]."""
    return torch.full(
        (library.few_bits_panels(out_features),), library.few_bits_form(4, True), dtype=torch.uint8
    )


def _forms_needed(library: ctypes.CDLL, weight: torch.Tensor) -> torch.Tensor | None:
    """Find the form that each panel of an int5 weight needs, uint8 [panels]; None if the weight should be
    int8 instead."""
    forms = torch.empty(library.few_bits_panels(weight.shape[0]), dtype=torch.uint8)
    is_bfloat16 = int(weight.dtype == torch.bfloat16)
    library.few_bits_needed(
        weight.data_ptr(), is_bfloat16, *weight.shape, forms.data_ptr(), torch.get_num_threads()
    )
    is_few = forms != library.few_bits_form(8, False)
    return forms if bool(forms.all()) and int(is_few.sum()) >= FEW_BITS_SHARE * len(forms) else None


def _room(
    library: ctypes.CDLL, memory: HugePageMemory, shape: torch.Size, storage: str, forms: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate the data of a packed weight, and the scales of an int8 one. Data of few bits begin with the
    places of their panels and contain their scales (cpp/few_bits.h)."""
    out_features, in_features = shape
    if forms is None:
        num_elements = library.packed_elements(out_features, in_features)
        data = _empty(memory, num_elements, _ELEMENTS[storage])
        scales = _empty(memory, num_elements // GROUP, torch.float16) if storage == "int8" else None
    else:
        header = -(-8 * (len(forms) + 1) // 64) * 64
        sizes = torch.tensor([library.few_bits_panel_bytes(in_features, form) for form in forms.tolist()])
        places = torch.cat([torch.tensor([header]), header + sizes.cumsum(0)])
        data = _empty(memory, int(places[-1]), torch.uint8)
        data[: places.nbytes] = places.view(torch.uint8)
        scales = None
    return data, scales


def _empty(memory: HugePageMemory, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory.take(count * dtype.itemsize), dtype=dtype, count=count)


def take_apart(weight: PackedWeight) -> PackedForm:
    """Take a packed weight apart into a form from which ``put_together`` rebuilds it without packing."""
    tensors = {"data": weight.data, "scales": weight.scales}
    if weight.sketch is not None:
        sketch = weight.sketch
        tensors |= {"sketch": sketch.weight.data, "sketch_spreads": sketch.spreads}
    return PackedForm(
        {"out_features": weight.out_features, "in_features": weight.in_features, "storage": weight.storage},
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
    )


def put_together(form: PackedForm) -> PackedWeight:
    values, tensors = form.values, form.tensors
    sizes = int(values["out_features"]), int(values["in_features"])
    weight = _described(*sizes, str(values["storage"]), tensors["data"], tensors.get("scales"))
    if "sketch" not in tensors:
        return weight
    sketch = _described(*sizes, "int4", tensors["sketch"], None)
    return replace(weight, sketch=Sketch(sketch, tensors["sketch_spreads"]))


def _described(
    out_features: int,
    in_features: int,
    storage: str,
    data: torch.Tensor,
    scales: torch.Tensor | None,
) -> PackedWeight:
    descriptor = PackedWeightRecord(
        data.data_ptr(),
        scales.data_ptr() if scales is not None else None,
        out_features,
        in_features,
        GROUP,
        _KINDS[storage],
    )
    return PackedWeight(
        out_features, in_features, storage, data, scales, descriptor, ctypes.addressof(descriptor)
    )


def _fits_bfloat16(weight: torch.Tensor) -> bool:
    """Whether rounding to bfloat16 changes nothing. The weight is checked in slices, since most weights that
    do not fit differ in the first one."""
    rows = max(1, (1 << 20) // weight.shape[1])
    return all(bool((piece == piece.bfloat16()).all()) for piece in torch.split(weight, rows))
