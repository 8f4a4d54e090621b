"""Two ranks on a CPU, the second a process of its own, compute what one does: logits, tokens, scores and
pooled states, over prefill, decode and recycled windows, for one, two and four KV heads. The group is the
same for all models."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.open import open_checkpoint
from model.execution.runner import ModelRunner
from model.interface.errors import ConfigError
from model.interface.kv_cache_spec import KVCachePlan
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import NOT_FINITE, ChunkResult, SequenceChunk, StepMemoryError
from model.network.gemma3 import MLP
from model.parallel.group import Group
from model.parallel.ranks import RankError, Ranks
from model.parallel.runner import ParallelRunner
from server.engine.memory import run_within_memory
from tests.model.harness import GREEDY, Harness, TestSequence, assert_close
from tests.model.parallel.hungry_worker import HUNGRY, HUNGRY_ROWS
from tests.model.tiny_models import TINY_FOLDER, random_prompt
from tests.tiny import write_tiny_folder

# Sums of float32 in two halves: a few units of the last of 24 bits, on logits of magnitude 10.
TOLERANCE = 1e-5
BLOCK_SIZE = 4
SCORING = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=2)


@dataclass
class TwoRanks:
    """The group, once a model has been loaded on it."""

    ranks: Ranks
    group: Group | None = None
    runner: ParallelRunner | None = None

    def load(self, folder: Path, **arguments: str) -> ParallelRunner:
        checkpoint = open_checkpoint(str(folder), progress=False)
        options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1, **arguments}
        runner = ParallelRunner.load_on(
            self.ranks, checkpoint, group=self.group, block_size=BLOCK_SIZE, progress=False, **options
        )
        self.group, self.runner = runner.group, runner
        return runner


@pytest.fixture(scope="module")
def two() -> Iterator[TwoRanks]:
    two = TwoRanks(Ranks(2, "tests.model.parallel.hungry_worker"))
    with contextlib.closing(two.ranks):
        yield two
    if two.group is not None:
        two.group.close()


def load_alone(folder: Path, **arguments: str) -> ModelRunner:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", **arguments}
    return ModelRunner.load(
        open_checkpoint(str(folder), progress=False),
        block_size=BLOCK_SIZE,
        num_threads=1,
        progress=False,
        **options,
    )


class RecordingHarness(Harness):
    """Keeps the logits of every step. Blocks are handed out alike in two harnesses that get the same work."""

    def __init__(self, runner: ModelRunner, num_tokens: int = 400, num_seqs: int = 4) -> None:
        super().__init__(
            runner.model, runner.ops, block_size=BLOCK_SIZE, num_tokens=num_tokens, num_seqs=num_seqs
        )
        self.recorded: list[torch.Tensor] = []
        plan = replace(_plan_of(self), capacity_tokens=num_tokens)
        if isinstance(runner, ParallelRunner):
            runner.allocate_cache(plan)
            self.runner = runner
            assert runner.cache is not None
            self.cache = runner.cache
        whole: Callable[[torch.Tensor], torch.Tensor] = type(runner.model).logits.__get__(runner.model)

        def recording(hidden: torch.Tensor) -> torch.Tensor:
            logits = whole(hidden)
            self.recorded.append(logits.clone())
            return logits

        self.runner.model.logits = recording  # type: ignore[method-assign]
        self.runner.model.greedy = lambda hidden: None  # type: ignore[method-assign]  # the long way, over logits


def _plan_of(harness: Harness) -> KVCachePlan:
    layers = zip(harness.config.global_layers, harness.cache.layers, strict=True)
    blocks = {is_global: layer.keys.shape[0] for is_global, layer in layers}
    return KVCachePlan(blocks[True], blocks[False], 0, 0, 0)


@dataclass
class Work:
    """The same sequences for two harnesses."""

    harness: RecordingHarness
    sequences: list[TestSequence] = field(default_factory=list)
    results: list[list[ChunkResult]] = field(default_factory=list)

    def run(self) -> None:
        vocab_size = self.harness.config.vocab_size
        first = TestSequence(random_prompt(5, vocab_size))
        second = TestSequence(random_prompt(31, vocab_size, 1), replace(SCORING, max_tokens=1))
        third = TestSequence(random_prompt(70, vocab_size, 2))
        self.sequences = [first, second, third]
        self.step([(first, 5), (second, 11)])
        self.step([(first, 1), (second, 20), (third, 33)])
        self.step([(first, 1), (second, 1), (third, 37)])
        for _ in range(12):
            self.step([(sequence, 1) for sequence in self.sequences])

    def step(self, work: list[tuple[TestSequence, int]]) -> None:
        results = self.harness.run(work, score=True)
        for (sequence, _), result in zip(work, results, strict=True):
            assert result.error is None
            sequence.tokens += result.token_ids
        self.results.append(results)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 2},
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
        {"num_key_value_heads": 2, "vocab_size": 511, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    ids=["1 KV head", "2 KV heads", "4 KV heads, untied", "odd vocabulary"],
)
def test_logits_and_tokens_are_those_of_one_rank(
    changes: dict[str, Any], two: TwoRanks, tmp_path: Path
) -> None:
    folder = write_tiny_folder(tmp_path, sliding_window=16, **changes)
    alone, divided = (Work(RecordingHarness(runner)) for runner in (load_alone(folder), two.load(folder)))
    for work in (alone, divided):
        work.run()
    assert divided.harness.recycled > 0, "windows have moved on"
    assert len(alone.harness.recorded) == len(divided.harness.recorded)
    for expected, actual in zip(alone.harness.recorded, divided.harness.recorded, strict=True):
        assert_close(actual, expected, TOLERANCE)
    assert [sequence.tokens for sequence in divided.sequences] == [
        sequence.tokens for sequence in alone.sequences
    ]
    for expected_results, results in zip(alone.results, divided.results, strict=True):
        for one, other in zip(expected_results, results, strict=True):
            scores, expected_scores = other.prompt_logprobs, one.prompt_logprobs
            assert [entry.token_id for entry in scores] == [entry.token_id for entry in expected_scores]
            assert [entry.logprob for entry in scores] == pytest.approx(
                [e.logprob for e in expected_scores], abs=TOLERANCE
            )


def test_each_rank_holds_half_and_says_so(two: TwoRanks) -> None:
    folder = TINY_FOLDER / "equal_heads_underscore_pattern"
    alone, divided = load_alone(folder), two.load(folder)
    assert divided.spec.bytes_per_token_per_layer * 2 == alone.spec.bytes_per_token_per_layer
    assert 0.5 * alone.weight_bytes <= divided.weight_bytes < 0.6 * alone.weight_bytes, (
        "norms are in both halves"
    )
    assert divided.free_memory() == pytest.approx(alone.free_memory() / 2, rel=0.3)


def test_weights_in_fewer_bits_are_rounded_as_on_one_rank(two: TwoRanks, tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path)
    runners = (
        load_alone(folder, quantization="int8"),
        two.load(folder, quantization="int8"),
        load_alone(folder),
    )
    harnesses = [RecordingHarness(runner) for runner in runners]
    if harnesses[0].runner.quantization == "none":
        pytest.skip("no compiled kernels on this machine")
    for harness in harnesses:
        harness.run([(TestSequence(random_prompt(40, 500)), 40)])
    alone, divided, not_rounded = (harness.recorded[0] for harness in harnesses)
    # Activations are rounded, too, and keys and values to bfloat16: a sum in two halves may fall on the other
    # side, 2^-8 away.
    assert_close(divided, alone, 1e-2)
    assert (alone - not_rounded).abs().max() > 0.1, "what weights rounded in another way would differ by"


@pytest.fixture(scope="module")
def loaded(two: TwoRanks) -> ParallelRunner:
    runner = two.load(TINY_FOLDER / "gqa_sliding_window_pattern")
    RecordingHarness(runner)
    return runner


@pytest.fixture(scope="module")
def alone() -> ModelRunner:
    return load_alone(TINY_FOLDER / "gqa_sliding_window_pattern")


def prefill(
    runner: ModelRunner, harness: Harness, length: int, seed: int = 0
) -> tuple[SequenceChunk, TestSequence]:
    sequence = TestSequence(random_prompt(length, harness.config.vocab_size, seed))
    return harness.chunk(sequence, length), sequence


def test_pooled_states_are_those_of_one_rank(loaded: ParallelRunner, alone: ModelRunner) -> None:
    sums = []
    for runner in (alone, loaded):
        harness = RecordingHarness(runner)
        chunk, _ = prefill(runner, harness, 20)
        chunk.pooling, chunk.samples = True, False
        (result,) = harness.run_chunks([chunk])
        sums.append(torch.from_numpy(result.hidden_sum))
    assert_close(sums[1], sums[0], 1e-3)  # of 20 float32 rows
    harness = RecordingHarness(loaded)
    chunk, _ = prefill(loaded, harness, 20)
    assert_close(loaded.hidden_states(harness.step_of([chunk])).sum(0).double(), sums[0], 1e-3)


def test_a_sequence_that_is_not_finite_on_one_rank_fails_alone(loaded: ParallelRunner) -> None:
    harness = RecordingHarness(loaded)
    sequences = [TestSequence(random_prompt(20, harness.config.vocab_size)) for _ in range(3)]
    harness.run([(sequence, 19) for sequence in sequences])
    harness.cache.layers[0].values[sequences[1].local_table[-2], 3] = torch.inf  # of rank 0's KV head
    results = harness.run([(sequence, 1) for sequence in sequences])
    assert [result.error for result in results] == [None, NOT_FINITE, None]
    assert [len(result.token_ids) for result in results] == [1, 0, 1]


def test_a_target_without_a_token_fails_alone(loaded: ParallelRunner) -> None:
    harness = RecordingHarness(loaded)
    odd, even = TestSequence([2, 30_000, 5], SCORING), TestSequence([2, 20, 5], SCORING)
    chunks = [harness.chunk(sequence, 3, score=True) for sequence in (odd, even)]
    chunks[0].token_ids = [2, 20, 5]
    results = harness.run_chunks(chunks)
    assert [result.error is None for result in results] == [False, True]
    assert len(results[1].prompt_logprobs) == 2


class TestLackOfMemory:
    """The ranks agree that the step has failed, and it can be run again, whichever had no memory and
    wherever."""

    @staticmethod
    def expected(alone: ModelRunner, length: int) -> list[int]:
        harness = RecordingHarness(alone)
        chunk, _ = prefill(alone, harness, length)
        return harness.run_chunks([chunk])[0].token_ids

    def test_of_another_rank_between_two_layers(self, loaded: ParallelRunner, alone: ModelRunner) -> None:
        harness = RecordingHarness(loaded)
        chunk, _ = prefill(loaded, harness, HUNGRY)
        with pytest.raises(StepMemoryError, match="rank 1: no memory for what is between the layers"):
            harness.run_chunks([chunk])
        faults: list[StepMemoryError] = []
        result = run_within_memory(loaded, harness.step_of([chunk]), faults.append)[0]
        assert len(faults) == 1
        assert result.token_ids == self.expected(alone, HUNGRY)

    def test_of_another_rank_in_its_logits(self, loaded: ParallelRunner, alone: ModelRunner) -> None:
        tokens = []
        for runner in (loaded, alone):
            harness = RecordingHarness(runner, num_seqs=HUNGRY_ROWS)
            chunks = [prefill(runner, harness, 4, seed)[0] for seed in range(HUNGRY_ROWS)]
            faults: list[StepMemoryError] = []
            results = run_within_memory(harness.runner, harness.step_of(chunks), faults.append).all()
            tokens.append([result.token_ids for result in results])
            assert [str(fault) for fault in faults] == (
                ["rank 1: no memory for logits"] if runner is loaded else []
            )
        assert tokens[0] == tokens[1]

    def test_of_rank_0_between_two_layers(
        self, loaded: ParallelRunner, alone: ModelRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness = RecordingHarness(loaded)
        chunk, _ = prefill(loaded, harness, 9)
        forward, calls = MLP.forward, iter(range(100))

        def hungry(self: MLP, hidden: torch.Tensor) -> torch.Tensor:
            if next(calls) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward(self, hidden)

        with monkeypatch.context() as patch:
            patch.setattr(MLP, "forward", hungry)
            with pytest.raises(StepMemoryError, match="CUDA out of memory"):
                harness.run_chunks([chunk])
        assert harness.run_chunks([chunk])[0].token_ids == self.expected(alone, 9)

    def test_of_rank_0_in_its_logits(
        self, loaded: ParallelRunner, alone: ModelRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness = RecordingHarness(loaded)
        chunk, _ = prefill(loaded, harness, 8)

        def hungry(*args: object) -> torch.Tensor:
            raise torch.OutOfMemoryError("no memory for logits")

        with monkeypatch.context() as patch:
            patch.setattr(loaded.ops, "logits", hungry)
            with pytest.raises(StepMemoryError, match="no memory for logits"):
                harness.run_chunks([chunk])
        assert harness.run_chunks([chunk])[0].token_ids == self.expected(alone, 8)

    def test_of_rank_0_between_two_slices_of_logits(
        self, loaded: ParallelRunner, alone: ModelRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        harness = RecordingHarness(loaded)
        sequence = TestSequence(random_prompt(100, harness.config.vocab_size), SCORING)
        chunk = harness.chunk(sequence, 100, score=True)

        def hungry(*args: object, **options: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(loaded.sampler, "logprobs", hungry)
            with pytest.raises(StepMemoryError):
                harness.run_chunks([chunk])
        (result,) = harness.run_chunks([chunk])
        assert len(result.prompt_logprobs) == 99
        assert result.token_ids == self.expected(alone, 100)


def test_settings_that_cannot_be_are_refused_before_anything_is_loaded(
    two: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(str(TINY_FOLDER / "head_equal"), progress=False)
    monkeypatch.setattr(two.ranks, "size", 3)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 does not divide"):
        ParallelRunner.load_on(two.ranks, checkpoint, device="cpu", group=two.group)
    monkeypatch.setattr(two.ranks, "size", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match="--tensor-parallel-size 2 needs as many CUDA devices, and this machine has 1"
    ):
        ParallelRunner.load_on(two.ranks, checkpoint, device="cuda", group=two.group)


def test_a_fault_of_another_rank_is_the_fault_of_the_load(two: TwoRanks, tmp_path: Path) -> None:
    runner = two.load(TINY_FOLDER / "head_equal")
    with pytest.raises(ConfigError, match="kv-cache-memory"):
        runner.allocate_cache(replace(_plan_of(RecordingHarness(runner)), num_global_blocks=1 << 50))
    RecordingHarness(runner).run([(TestSequence([2, 5, 7]), 3)])


def test_the_end_of_a_rank_ends_the_runner(two: TwoRanks) -> None:
    """The last test: the group is gone with it."""
    runner = two.load(TINY_FOLDER / "head_equal")
    harness = RecordingHarness(runner)
    chunk = harness.chunk(TestSequence([2, 5, 7], GREEDY), 3)
    os.kill(two.ranks.process_ids[0], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 of 2 .* was ended by SIGKILL"):
        harness.run_chunks([chunk])
