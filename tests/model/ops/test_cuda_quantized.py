"""Linear layers in 8 bits for GPUs: packing, numerics by the same torch functions on the CPU, and what is
refused."""

import pytest
import torch
import torch.nn.functional as F

from model.execution.runner import ModelRunner
from model.interface.errors import ConfigError
from model.network.gemma3 import Gemma3
from model.ops.cuda.quantized import (
    PACKED_ROWS,
    Fp8Weight,
    Int8Weight,
    QuantizedOps,
    check_fp8,
    pack_fp8,
    quantize_fp8,
    quantize_int8,
)
from model.ops.interface import LinearWeight
from model.ops.reference import PlainWeight
from model.ops.select import select_ops
from model.precision import resolve_quantization
from tests.model.harness import Harness
from tests.model.tiny_models import CONFIG, random_prompt, random_tensors

CPU = torch.device("cpu")


def random_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, as channels have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 1, rows)[:, None]


def test_int8_weights_are_off_by_half_a_step_at_most() -> None:
    weight = random_weight(PACKED_ROWS + 5, 64)
    weight[7] = 0
    packed = quantize_int8(weight)
    assert packed.data.dtype == torch.int8
    assert packed.nbytes == weight.numel() + 4 * len(weight)
    error = (packed.widened(torch.float32) - weight).abs().amax(dim=1)
    step = weight.abs().amax(dim=1) / 127
    assert (error <= step * 0.501).all()
    assert (packed.data[7] == 0).all()


def test_fp8_rounds_relative_to_each_row() -> None:
    weight = random_weight(PACKED_ROWS + 16, 64)
    weight[7] = 0
    packed = pack_fp8(weight)
    restored = packed.data.float() * packed.scales[:, None]
    # Three bits of mantissa: half a step is 2^-4 of a number; below 2^-6 of scale the steps stay as they are.
    assert ((restored - weight).abs() <= weight.abs() * 2.0**-4 + packed.scales[:, None] * 2.0**-10).all()
    assert (restored.abs().amax(dim=1) - weight.abs().amax(dim=1)).abs().max() <= 1e-6 * weight.abs().max()
    assert packed.nbytes == weight.numel() + 4 * len(weight)


def test_numbers_of_every_size_survive_fp8() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.logspace(-30, 30, 61).to(dtype)[:, None] * torch.tensor([[1.0, -0.5, 0.25, 0.0]]).to(dtype)
        data, scales = quantize_fp8(x)
        assert data.float().isfinite().all()
        relative = (data.float() * scales[:, None] - x.float()).abs() / x.float().abs().amax(
            dim=1, keepdim=True
        )
        assert relative[18:].max() < 2.0**-4  # the first rows are below the smallest scale, and vanish
        assert (data.float() * scales[:, None]).abs()[:18].max() < 1e-11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 33])
def test_linears_are_the_product_of_what_is_kept(dtype: torch.dtype, num_rows: int) -> None:
    weight = random_weight(48, 64).to(dtype)
    x = torch.randn(num_rows, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    int8, fp8 = QuantizedOps(CPU, dtype, "int8"), QuantizedOps(CPU, dtype, "fp8")
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
    for ops in (int8, fp8):
        packed = ops.pack_linear(weight, "down")
        assert isinstance(packed, Int8Weight | Fp8Weight)
        kept = packed.data.float() * packed.scales[:, None]
        inputs = x.float()
        if isinstance(packed, Fp8Weight):
            data, scales = quantize_fp8(x)
            inputs = data.float() * scales[:, None]
        result = ops.linear(x, packed)
        assert result.shape == (num_rows, 48)
        assert result.dtype == dtype
        bound = (inputs.abs() @ kept.abs().t()) * rounding
        assert ((result.float() - inputs @ kept.t()).abs() <= bound + 1e-30).all()


def test_rows_do_not_influence_each_other() -> None:
    ops = QuantizedOps(CPU, torch.bfloat16, "fp8")
    weight = ops.pack_linear(random_weight(32, 64).bfloat16(), "qkv")
    x = torch.randn(4, 64).bfloat16()
    alone = ops.linear(x[1:2], weight)
    x[0], x[2], x[3] = torch.nan, torch.inf, 0
    together = ops.linear(x, weight)
    assert torch.equal(together[1:2], alone)
    assert (together[3] == 0).all()


def kinds(ops: QuantizedOps, rows: int, columns: int) -> dict[str, type[LinearWeight]]:
    weight = torch.randn(rows, columns)
    return {role: type(ops.pack_linear(weight, role)) for role in ("qkv", "down", "head")}


def test_the_head_stays_as_it_is_and_so_does_what_has_no_whole_groups() -> None:
    int8, fp8 = (QuantizedOps(CPU, torch.float32, kind) for kind in ("int8", "fp8"))
    assert kinds(int8, 32, 20) == {"qkv": Int8Weight, "down": Int8Weight, "head": PlainWeight}
    assert kinds(fp8, 32, 48) == {"qkv": Fp8Weight, "down": Fp8Weight, "head": PlainWeight}
    assert kinds(fp8, 32, 20) == dict.fromkeys(("qkv", "down", "head"), PlainWeight)
    assert fp8.linear(torch.ones(1, 20), fp8.pack_linear(torch.ones(3, 20), "down")).tolist() == [[20.0] * 3]
    assert (int8.quantization, int8.name) == ("int8", "reference (int8 weights)")


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.05), ("fp8", 0.25)])
def test_a_whole_network_is_close_to_the_exact_one(quantization: str, tolerance: float) -> None:
    """The tolerance is the rounding of seven layers of random weights, relative to the spread of the
    logits."""
    logits = []
    for ops in (select_ops(CPU, torch.float32), QuantizedOps(CPU, torch.float32, quantization)):  # type: ignore[arg-type]
        with torch.inference_mode():
            model = Gemma3(CONFIG, ops, CONFIG.vocab_size)
            model.load_weights(random_tensors(model).items())
        assert ModelRunner(model, CONFIG.kv_cache_spec(16, 4), ops).quantization == ops.quantization
        logits.append(Harness(model, ops, block_size=16, num_tokens=100).all_logits(random_prompt(80), 37))
    difference = (logits[1] - logits[0]).square().mean().sqrt() / logits[0].std()
    assert 0 < difference < tolerance


def test_what_is_refused_says_what_to_use() -> None:
    with pytest.raises(ConfigError, match="fp8 needs a CUDA device"):
        select_ops(CPU, torch.bfloat16, "fp8")
    with pytest.raises(ConfigError, match="int4 is not supported on GPUs"):
        select_ops(torch.device("cuda"), torch.bfloat16, "int4")
    with pytest.raises(ConfigError, match=r"8\.9 or later .* this one has 8\.0"):
        check_fp8(torch.bfloat16, (8, 0))
    with pytest.raises(ConfigError, match="--dtype bfloat16"):
        check_fp8(torch.float32, (9, 0))
    check_fp8(torch.bfloat16, (8, 9))
    check_fp8(torch.bfloat16, (9, 0))
    with pytest.raises(ConfigError, match="Use int8, int4, fp8, none or auto"):
        resolve_quantization("int3", "auto")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_is_none_on_a_gpu_until_something_else_is_measured_to_be_better() -> None:
    ops = select_ops(torch.device("cuda"), torch.bfloat16, resolve_quantization("auto", "auto"))
    assert ops.quantization == "none"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("num_rows", [1, 7, 16, 33, 256, 300])
def test_a_device_computes_the_same(quantization: str, num_rows: int) -> None:
    device = torch.device("cuda")
    if quantization == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8")
    ops = select_ops(device, torch.bfloat16, quantization)
    host = QuantizedOps(CPU, torch.bfloat16, quantization)  # type: ignore[arg-type]
    weight, x = random_weight(640, 2048).bfloat16(), torch.randn(num_rows, 2048).bfloat16()
    expected = host.linear(x, host.pack_linear(weight, "down")).float()
    result = ops.linear(x.to(device), ops.pack_linear(weight.to(device), "down")).float().cpu()
    bound = F.linear(x.float().abs(), weight.float().abs()) * 2.0**-7
    assert ((result - expected).abs() <= bound).all()
