"""The building blocks of the network that own weights: linear layers, norm scales, the embedding; and rotary
angles.

Weights are born on the meta device, so a network of any size costs nothing until it is filled. Each block
names the tensors of the checkpoint that it wants (``slots``) and takes them one at a time, in any order; once
a linear layer has all of its own, it hands its matrix to the backend, which may repack it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from model.config.gemma3_config import Gemma3Config
from model.config.tensors import EMBEDDING, HEAD, LinearRole, LinearSpec, TensorSpec, model_tensors
from model.ops.interface import LinearWeight, Ops, PackedForm


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place that one tensor of the checkpoint is loaded into."""

    shape: tuple[int, ...]
    fill: Callable[[torch.Tensor], None]


class Linear(nn.Module):
    """A linear layer without bias whose rows come from one or several tensors of the checkpoint (fused q, k,
    v or gate, up)."""

    def __init__(self, ops: Ops, spec: LinearSpec) -> None:
        super().__init__()
        self.ops = ops
        self.spec = spec
        self.missing = {piece.name for piece in spec.pieces}
        self.weight: torch.Tensor | None = None  # [out_features, in_features] while being filled
        self.packed: LinearWeight | None = None

    @property
    def role(self) -> LinearRole:
        return self.spec.role

    @property
    def in_features(self) -> int:
        return self.spec.in_features

    @property
    def out_features(self) -> int:
        return self.spec.out_features

    def slots(self) -> dict[str, WeightSlot]:
        slots = {}
        first_row = 0
        for piece in self.spec.pieces:
            slots[piece.name] = WeightSlot(piece.shape, self._filler(piece.name, first_row))
            first_row += piece.shape[0]
        return slots

    def _filler(self, name: str, first_row: int) -> Callable[[torch.Tensor], None]:
        def fill(tensor: torch.Tensor) -> None:
            if self.weight is None:
                self.weight = torch.empty(
                    self.out_features, self.in_features, dtype=self.ops.dtype, device=self.ops.device
                )
            self.weight[first_row : first_row + tensor.shape[0]].copy_(tensor)
            self.missing.discard(name)
            if not self.missing:
                self.pack(self.weight)
                self.weight = None

        return fill

    def pack(self, weight: torch.Tensor, *, shared: bool = False) -> None:
        self.packed = self.ops.pack_linear(weight, self.role, shared=shared)

    def packed_form(self) -> PackedForm:
        """The filled layer's weight in the form that is stored on disk."""
        assert self.packed is not None
        return self.ops.to_packed_form(self.packed)

    def accepts(self, form: PackedForm) -> bool:
        return (
            form.values.get("in_features") == self.in_features
            and form.values.get("out_features") == self.out_features
        )

    def restore(self, form: PackedForm) -> None:
        """Take the weight from a form for which ``accepts`` is true, instead of loading it from the
        checkpoint."""
        self.packed = self.ops.from_packed_form(form)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes if self.packed is not None else 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.packed is not None
        return self.ops.linear(x, self.packed)


class Head(Linear):
    """The output head. It leaves out the rows beyond the tokenizer's vocabulary, so an id without a token can
    never be sampled."""

    def __init__(self, ops: Ops, config: Gemma3Config, num_valid_tokens: int) -> None:
        super().__init__(ops, LinearSpec("head", (model_tensors(config)[HEAD],)))
        self.num_valid_tokens = num_valid_tokens

    def accepts(self, form: PackedForm) -> bool:
        return (
            form.values.get("in_features") == self.in_features
            and form.values.get("out_features") == self.num_valid_tokens
        )

    def pack(self, weight: torch.Tensor, *, shared: bool = False) -> None:
        super().pack(weight[: self.num_valid_tokens], shared=shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.packed is not None
        return self.ops.logits(x, self.packed)

    def greedy(self, x: torch.Tensor) -> torch.Tensor | None:
        """Call ``Ops.greedy`` with this head: hidden states [r, h] -> int64 [r] or None."""
        assert self.packed is not None
        return self.ops.greedy(x, self.packed)


class NormScale(nn.Module):
    """Gemma's RMSNorm weight, kept as the float32 factor (1 + weight) that the operations multiply by."""

    def __init__(self, ops: Ops, spec: TensorSpec) -> None:
        super().__init__()
        self.name = spec.name
        self.device = ops.device
        self.scale = torch.empty(spec.shape, dtype=torch.float32, device="meta")

    def slots(self) -> dict[str, WeightSlot]:
        return {self.name: WeightSlot(tuple(self.scale.shape), self._fill)}

    def _fill(self, tensor: torch.Tensor) -> None:
        self.scale = tensor.to(self.device, torch.float32) + 1.0

    def packed_form(self) -> PackedForm:
        return PackedForm({}, {"scale": self.scale})

    def accepts(self, form: PackedForm) -> bool:
        return _is_like(form, "scale", self.scale)

    def restore(self, form: PackedForm) -> None:
        self.scale = form.tensors["scale"].to(self.device)

    @property
    def nbytes(self) -> int:
        return self.scale.nbytes


class Embedding(nn.Module):
    """Token embedding times sqrt(hidden), the factor rounded to the compute dtype (25.25 for 640 in
    bfloat16)."""

    def __init__(self, ops: Ops, config: Gemma3Config) -> None:
        super().__init__()
        self.ops = ops
        self.shape = model_tensors(config)[EMBEDDING].shape
        self.weight = torch.empty(self.shape, dtype=ops.dtype, device="meta")
        self.normalizer = torch.tensor(config.hidden_size**0.5, dtype=ops.dtype, device=ops.device)

    def slots(self) -> dict[str, WeightSlot]:
        return {EMBEDDING: WeightSlot(self.shape, self._fill)}

    def _fill(self, tensor: torch.Tensor) -> None:
        self.weight = torch.empty(self.shape, dtype=self.ops.dtype, device=self.ops.device).copy_(tensor)

    def packed_form(self) -> PackedForm:
        return PackedForm({}, {"weight": self.weight})

    def accepts(self, form: PackedForm) -> bool:
        return _is_like(form, "weight", self.weight)

    def restore(self, form: PackedForm) -> None:
        self.weight = form.tensors["weight"].to(self.ops.device)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.weight[token_ids] * self.normalizer


def _is_like(form: PackedForm, name: str, tensor: torch.Tensor) -> bool:
    stored = form.tensors.get(name)
    return stored is not None and stored.shape == tensor.shape and stored.dtype == tensor.dtype


class RotaryEmbedding(nn.Module):
    """Rotary angles in float32 (RoPE) for each kind of layer: position / factor * theta ** (-2 i / D), in
    radians, for i < D / 2."""

    def __init__(
        self, head_dim: int, kinds: Mapping[bool, tuple[float, float]], device: torch.device
    ) -> None:
        """Compute the inverse frequencies. ``kinds``: theta and factor, by whether a layer is global."""
        super().__init__()
        self.kinds = tuple(kinds)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        frequencies = [1.0 / (theta**exponents) / factor for theta, factor in kinds.values()]
        self.inverse_frequencies = torch.stack(frequencies)[:, None, :]  # [kinds, 1, D / 2]

    def forward(self, positions: torch.Tensor) -> dict[bool, tuple[torch.Tensor, torch.Tensor]]:
        """Compute the angles' cosines and sines: positions int64 [n] -> cos, sin float32 [n, D / 2] of each
        kind."""
        angles = positions[:, None].float() * self.inverse_frequencies
        return dict(
            zip(self.kinds, zip(angles.cos().unbind(), angles.sin().unbind(), strict=True), strict=True)
        )
