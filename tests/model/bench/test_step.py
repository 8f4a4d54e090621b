"""The benchmark of steps on a CPU: the steps that it times are steps of a text, and its program prints its
tables."""

from pathlib import Path

import pytest

from model.bench.contexts import Decodes, plan_for, write_text
from model.bench.step import main
from model.execution.runner import ModelRunner
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import StepInput
from tests.model.ops.cpu.harness import needs_kernels
from tests.tiny import WINDOW, tiny_config, tiny_runner, write_tiny_folder

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return tiny_runner(plan_for(tiny_config().kv_cache_spec(16, 4), 1, 1))


def continuation(runner: ModelRunner, text: list[int]) -> list[int]:
    """The token after a text whose blocks are all there."""
    plan = plan_for(runner.spec, 1, len(text))
    runner.allocate_cache(plan)
    table = list(range(1, plan.num_global_blocks))
    return runner.run(StepInput.of_prompt(text, table, GREEDY, samples=True)).token_ids


@pytest.mark.parametrize("context", [1, 2, 16, 17, 40, WINDOW])
def test_every_sequence_goes_on_with_the_text(runner: ModelRunner, context: int) -> None:
    text = write_text(runner, context)
    assert len(text) == context
    expected = continuation(runner, text)
    decodes = Decodes(runner, 3, context, GREEDY, text)
    for _ in range(3):
        assert decodes.run().token_ids == expected * 3


def test_contexts_longer_than_the_text_end_with_it(runner: ModelRunner) -> None:
    text = write_text(runner, WINDOW)
    decodes = Decodes(runner, 2, 5 * WINDOW + 3, GREEDY, text)
    assert runner.cache is not None
    written = [int((layer.keys[1:].abs().sum((2, 3)) > 0).sum()) for layer in runner.cache.layers]
    first, second = decodes.run().token_ids
    assert first == second
    assert all(2 * (WINDOW - 16) <= count <= 2 * (WINDOW - 1) for count in written)


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
