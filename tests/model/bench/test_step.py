"""The benchmark of steps on a CPU: the steps that it times are steps of a text, and its program prints its
tables."""

import math
from pathlib import Path
from typing import cast

import pytest
import torch

from model.bench.contexts import Decodes, plan_for, write_text
from model.bench.cpu_kernels import PlainProducts
from model.bench.step import Floors, linear_work, linears, main
from model.checkpoint.open import open_checkpoint
from model.execution.runner import ModelRunner
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import StepInput
from model.ops.cpu.backend import CpuOps
from model.ops.cpu.weights import FACTORS, PackedWeight, WeightStorage
from tests.model.ops.cpu.harness import needs_kernels
from tests.tiny import WINDOW, tiny_config, tiny_runner, write_tiny_folder

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return tiny_runner(plan_for(tiny_config().kv_cache_spec(16, 4), 1, 1))


def continuation(runner: ModelRunner, text: list[int]) -> list[int]:
    """The token after a text whose blocks are all there."""
    plan = plan_for(runner.spec, 1, len(text))
    runner.allocate_cache(plan)
    table = list(range(1, plan.num_global_blocks))
    result = runner.run(StepInput.of_prompt(text, table, GREEDY, samples=True))
    return [int(token_id) for token_id in result.token_ids]


@pytest.mark.parametrize("context", [1, 2, 16, 17, 40, WINDOW])
def test_every_sequence_goes_on_with_the_text(runner: ModelRunner, context: int) -> None:
    text = write_text(runner, context)
    assert len(text) == context
    expected = continuation(runner, text)
    decodes = Decodes(runner, 3, context, GREEDY, text)
    for _ in range(3):
        assert decodes.run().token_ids.tolist() == expected * 3


def test_contexts_longer_than_the_text_end_with_it(runner: ModelRunner) -> None:
    text = write_text(runner, WINDOW)
    decodes = Decodes(runner, 2, 5 * WINDOW + 3, GREEDY, text)
    assert runner.cache is not None
    written = [int((layer.keys[1:].abs().sum((2, 3)) > 0).sum()) for layer in runner.cache.layers]
    first, second = decodes.run().token_ids
    assert first == second
    assert all(2 * (WINDOW - 16) <= count <= 2 * (WINDOW - 1) for count in written)


def few_bits_weight(num_features: int, num_inputs: int) -> torch.Tensor:
    """Values that 4 bits hold, but for an eighth of the features, which need 8."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(-8, 8, (num_features, num_inputs), generator=generator).float()
    fine = torch.randint(-127, 128, (num_features // 8, num_inputs), generator=generator).float()
    return torch.cat([steps[num_features // 8 :] / 32, fine / 1024])


@needs_kernels
@pytest.mark.parametrize(
    ("kept_as", "bits", "factor", "products"),
    [
        ("float32", 32, "float32", 1.0),
        ("bfloat16", 16, "float32", 1.0),
        ("int8", 8.5, "int16", 1.0),
        ("int4", 5, "int8", 1.0),
        ("few bits", 7 / 8 * 4.5 + 1 / 8 * 8.5, "int8", 9 / 8),  # halves of 8 bits are multiplied apart
    ],
)
def test_a_weight_says_what_a_linear_layer_reads_and_multiplies(
    kept_as: str, bits: float, factor: str, products: float
) -> None:
    features, inputs, rows = 256, 64, 3
    if kept_as == "few bits":
        ops, weight = CpuOps(CPU, torch.float32, "int8"), few_bits_weight(features, inputs)
    else:
        ops = CpuOps(CPU, torch.float32, cast(WeightStorage, kept_as))
        weight = torch.randn(features, inputs, generator=torch.Generator().manual_seed(0))
    packed = cast(PackedWeight, ops.pack_linear(weight, "down"))
    work = linear_work(packed, rows, greedy=True)
    assert (work.factor, work.products) == (factor, rows * features * inputs * products)
    places = 8 * (features // 16 + 1)  # of panels, at most; rounded up to whole cache lines
    assert features * inputs * bits / 8 <= work.num_bytes <= features * inputs * bits / 8 + places + 64


@needs_kernels
def test_a_greedy_step_reads_the_sketch_of_the_head_and_another_the_head() -> None:
    ops = CpuOps(CPU, torch.float32, "int8")
    weight = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    head = cast(PackedWeight, ops.pack_linear(weight, "head"))
    assert head.sketch is not None
    greedy, sampled = (linear_work(head, 1, greedy=is_greedy) for is_greedy in (True, False))
    assert (greedy.factor, sampled.factor) == ("int8", "int16")
    assert greedy.num_bytes == head.sketch.nbytes < sampled.num_bytes == 512 * 64 * 8.5 / 8
    assert greedy.products == sampled.products == 512 * 64


@needs_kernels
def test_the_floor_of_a_part_is_the_larger_of_reading_and_multiplying(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny_folder(tmp_path / "tiny")), progress=False)
    runner = ModelRunner.load(checkpoint, dtype="float32", device="cpu", progress=False)
    config, spec, num_seqs, context = runner.config, runner.spec, 3, WINDOW + 40
    floors = Floors(runner, num_seqs, context, greedy=False)
    packed = [(part, cast(PackedWeight, module.packed)) for part, module in linears(runner)]
    read = {part: sum(weight.nbytes for of, weight in packed if of == part) for part, _ in packed}
    for kind, layers, length in (
        ("global", config.num_global_layers, context),
        ("local", config.num_local_layers, WINDOW),
    ):
        read[f"attention, {kind}"] = num_seqs * layers * length * spec.bytes_per_token_per_layer
    no_arithmetic = dict.fromkeys(floors.factors, math.inf)
    assert floors.seconds(1e9, no_arithmetic) == {part: count / 1e9 for part, count in read.items()}
    computing = floors.seconds(math.inf, dict.fromkeys(floors.factors, 1e9))
    assert computing["linear head"] == num_seqs * packed[-1][1].out_features * config.hidden_size / 1e9
    heads = config.num_attention_heads * config.head_dim
    assert computing["attention, local"] == 2 * num_seqs * config.num_local_layers * WINDOW * heads / 1e9
    both = floors.seconds(1e9, dict.fromkeys(floors.factors, 1e9))
    assert both == {part: max(read[part] / 1e9, computing[part]) for part in read}


@needs_kernels
def test_an_instruction_multiplies_more_numbers_the_shorter_they_are() -> None:
    counts = {factor: PlainProducts(factor).count for factor in FACTORS.values()}
    assert counts["int16"] == 2 * counts["float32"]
    assert counts["int8"] == 4 * counts["float32"]
    assert counts["float32"] % (8 * PlainProducts.ITEMS * PlainProducts.ROUNDS) == 0


@needs_kernels
def test_the_program_prints_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    main(["--model", str(folder), "--sequences", "1", "3", "--contexts", "20", "100", "--budget", "0"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if "tokens of context each, greedy; read bandwidth meanwhile" in line]
    assert [title.split(", greedy")[0] for title in titles] == [
        f"{count} sequences, {context} tokens of context each" for count in (1, 3) for context in (20, 100)
    ]
    for part in (
        "linear qkv",
        "attention, local",
        "attention, global",
        "linear head",
        "everything else",
        "step",
    ):
        figures = [float(line[28:37]) for line in lines if line.startswith(part.ljust(28))]
        assert len(figures) == 4, part
        assert min(figures) >= 0
    assert sum(line.endswith("of the bandwidth") for line in lines) == 4
