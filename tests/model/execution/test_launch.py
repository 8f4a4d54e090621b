"""``ModelRunner.launch``: a step of plain chunks is handed to the device without waiting; its results are
those of ``run``."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.bench.stub_device import stub_runner
from model.execution import runner as runner_module
from model.execution.device_batch import DeviceBatch
from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import NOT_FINITE, ChunkResult, SequenceChunk, StepInput, StepResult
from model.network.forward_batch import ForwardBatch, forward_batch
from model.network.gemma3 import Gemma3
from model.network.pending_step import PendingStep
from model.ops.reference import ReferenceOps
from server.bench.engine_overhead import decoding_core
from tests.model.graphs import LiveHarness
from tests.model.harness import GREEDY, TestSequence
from tests.model.tiny_models import CONFIG, random_model, random_prompt, random_tensors

SAMPLED = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, seed=3)
TOP_K = SamplingParams(max_tokens=1, temperature=0.7, top_k=5, seed=4)
WAITING_OPERATIONS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "repeat_interleave",
}
WAITING_METHODS = (
    "tolist",
    "item",
    "cpu",
    "numpy",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)


class WaitedError(Exception):
    """The host needs a number that the device computes."""


class _RefuseWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is not typed
    is_armed = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_armed and func.overloadpacket.__name__ in WAITING_OPERATIONS:
            raise WaitedError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def refusing_to_wait(ops: Any = None) -> Iterator[None]:
    """Whoever asks for a number of the device's gets an error, except within a draw of ``ops``: that is a
    backend's business."""
    trap = _RefuseWaiting()  # type: ignore[no-untyped-call]

    def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any) -> Any:
            if trap.is_armed:
                raise WaitedError
            return original(*arguments)

        return method

    def exempt(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any) -> Any:
            trap.is_armed = False
            result = original(*arguments)
            trap.is_armed = True
            return result

        return method

    with pytest.MonkeyPatch.context() as patch, trap:
        for name in WAITING_METHODS:
            patch.setattr(torch.Tensor, name, refusing(getattr(torch.Tensor, name)))
        for name in ("draw", "top_candidates") if ops is not None else ():
            patch.setattr(ops, name, exempt(getattr(ops, name)))
        yield


@pytest.fixture(scope="module")
def model() -> Gemma3:
    return random_model()


def prefilled(
    model: Gemma3, settings: list[SamplingParams]
) -> tuple[LiveHarness, StepInput, list[TestSequence]]:
    """Sequences whose next step, which is given, is a decode."""
    harness = LiveHarness(model, model.ops, block_size=16, num_tokens=400, num_seqs=len(settings))
    sequences = [TestSequence(random_prompt(20 + i, seed=i), sampling) for i, sampling in enumerate(settings)]
    harness.run([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    return harness, harness.step_of([harness.chunk(sequence, 1) for sequence in sequences]), sequences


@pytest.mark.parametrize(
    "settings", [[GREEDY] * 3, [SAMPLED] * 3, [TOP_K] * 3, [GREEDY, SAMPLED, TOP_K, GREEDY]]
)
def test_nothing_that_the_device_computes_is_waited_for_before_the_results(
    model: Gemma3, settings: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, step, _ = prefilled(model, settings)
    expected = harness.runner.run(step)
    # What the network itself does on a device is its backend's business; here it has been done before.
    computed = harness.runner.hidden_states(step)
    monkeypatch.setattr(harness.runner, "_forward", lambda *_: computed)
    harness.runner.sampler.may_wait = False
    with refusing_to_wait(harness.runner.ops):
        pending = harness.runner.launch(step)
    assert pending.results().all() == expected.all()


@pytest.mark.parametrize("mirrors_tables", [False, True])
def test_the_batch_of_a_decode_step_is_laid_out_without_waiting(mirrors_tables: bool) -> None:
    runner = stub_runner()
    runner.mirrors_tables = mirrors_tables
    core = decoding_core(runner, runner.spec, [33] * 5, temperature=1.0)
    step = core.scheduler.schedule()
    assert step is not None
    assert len(step.decodes) == 5
    with refusing_to_wait():
        pending = runner.launch(step)
    assert len(pending.results()) == 5


@pytest.mark.parametrize("subset", [False, True])
def test_a_step_that_takes_the_tokens_of_the_last_one_is_launched_without_waiting(subset: bool) -> None:
    runner = stub_runner()
    core = decoding_core(runner, runner.spec, [33] * 5, temperature=1.0, async_scheduling=True)
    for _ in range(3):
        core.step()
    if subset:
        core.abort("2")
    assert core._launched
    with refusing_to_wait():
        step = core.scheduler.schedule()
        assert step is not None
        assert step.token_ids is None
        assert core._run(step)
    assert len(step.decodes) == (4 if subset else 5)


def test_tables_are_kept_on_the_device_while_steps_are_launched_ahead() -> None:
    runner = stub_runner()
    runner.mirrors_tables = True
    core = decoding_core(runner, runner.spec, [33] * 5, async_scheduling=True)
    kept, num_sent = set(), []
    for _ in range(100):
        core.step()
        assert runner._device_batch is not None
        assert runner._device_batch._tables is not None
        kept.add(runner._device_batch._tables.data_ptr())
        num_sent.append(len(core.scheduler.batch.changes.rows))
    assert len(kept) == 1
    assert not any(num_sent), "what a launched step was told is not told again"
    assert core._launched


def test_tokens_go_on_as_they_were_drawn_and_those_that_are_none_do_no_harm() -> None:
    drawn = torch.tensor([7, -1, 9])
    on_device = DeviceBatch(RunningBatch(5, 1), torch.device("cpu"), mirrors_tables=False)
    on_device.keep_tokens(torch.tensor([4, 0, 2]), drawn)
    assert on_device.last_tokens(torch.tensor([4, 0, 2])).tolist() == [7, 0, 9]
    assert on_device.last_tokens(torch.tensor([2, 4])).tolist() == [9, 7]
    results = PendingStep({}, drawn).results()
    assert [result.token_ids for result in results.all()] == [[7], [], [9]]
    assert results[1].error == NOT_FINITE


def test_tokens_and_other_results_stand_where_their_sequences_do() -> None:
    other = ChunkResult(token_ids=[5])
    results = PendingStep({1: other}, torch.tensor([7, 9]), np.array([0, 2])).results()
    assert len(results) == 3
    assert [result.token_ids for result in results.all()] == [[7], [5], [9]]
    assert results[1] is other
    assert PendingStep({0: other}).results().all() == [other]


def test_a_step_that_waits_is_noticed(model: Gemma3) -> None:
    harness, step, _ = prefilled(model, [replace(SAMPLED, logprobs=1)])
    with refusing_to_wait(), pytest.raises(WaitedError):
        harness.runner.launch(step)


def test_a_row_that_is_not_finite_fails_alone_without_being_waited_for(model: Gemma3) -> None:
    harness, step, sequences = prefilled(model, [SAMPLED, GREEDY, TOP_K])
    expected = harness.runner.run(step)
    harness.runner.sampler.may_wait = False
    assert harness.runner.run(step).all() == expected.all()
    harness.cache.layers[0].values[sequences[1].local_table[0], 3] = math.inf
    results = harness.runner.run(step)
    assert (results[0], results[2]) == (expected[0], expected[2])
    assert results[1].error == NOT_FINITE


def test_rows_that_decode_give_in_every_step_what_chunks_of_a_token_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By row, with tables that the device keeps and is told the changes of; and as chunks, over tables that
    the step brings."""
    batches: list[ForwardBatch] = []

    def recorded(*arguments: Any) -> ForwardBatch:
        batches.append(forward_batch(*arguments))
        return batches[-1]

    monkeypatch.setattr(runner_module, "forward_batch", recorded)
    runner, fresh = stub_runner(), stub_runner()
    runner.mirrors_tables = True
    core = decoding_core(runner, runner.spec, [5, 40, 17, 33, 900], temperature=1.0)
    run, num_steps = runner.run, 0

    def checked(step: StepInput) -> StepResult:
        nonlocal num_steps
        assert len(step.decodes) == 5
        assert step.token_ids is not None
        batches.clear()
        result = run(step)
        each = zip(step.decodes.tolist(), step.starts.tolist(), step.token_ids.tolist(), strict=True)
        chunks = [SequenceChunk(row, [token_id], start, samples=True) for row, start, token_id in each]
        fresh.run(StepInput(step.batch, prefills=chunks))
        by_row, of_chunks = batches
        compare(by_row, of_chunks, runner.spec)
        num_steps += 1
        return result

    runner.run = checked  # type: ignore[method-assign]
    for _ in range(700):
        core.step()
    assert num_steps == 700
    assert core.stats.recycled_blocks_total > 40


def compare(by_row: ForwardBatch, of_chunks: ForwardBatch, spec: KVCacheSpec) -> None:
    assert by_row.token_ids.equal(of_chunks.token_ids)
    assert by_row.positions.equal(of_chunks.positions)
    for name in ("global_attention", "local_attention"):
        one, other = getattr(by_row, name), getattr(of_chunks, name)
        assert (one.query_lens, one.context_lens, one.window) == (
            other.query_lens,
            other.context_lens,
            other.window,
        )
        for field in ("query_start", "context_lens_tensor", "slot_mapping"):
            assert getattr(one, field).equal(getattr(other, field)), field
        assert one.slot_mapping.is_contiguous()
        assert one.block_table.stride(1) == other.block_table.stride(1) == 1
        for row, context in enumerate(one.context_lens):
            first = 0 if one.window is None else max(0, context - one.window) // spec.block_size
            visible = slice(first, spec.global_blocks(context))
            assert one.block_table[row, visible].equal(other.block_table[row, visible])
            assert one.block_table[row, visible].all(), "no key that is read lies in the null block"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_step_is_launched_without_waiting() -> None:
    with torch.inference_mode():
        model = Gemma3(CONFIG, ReferenceOps(torch.device("cuda"), torch.float32), CONFIG.vocab_size)
        model.load_weights(random_tensors(model, 0).items())
    harness, step, _ = prefilled(model, [GREEDY, GREEDY])
    computed = harness.runner.hidden_states(step)
    expected = harness.runner.run(step)
    harness.runner._forward = lambda *_: computed  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = harness.runner.launch(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.results().all() == expected.all()
