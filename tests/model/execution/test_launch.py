"""``ModelRunner.launch``: a step of plain chunks is handed to the device without waiting; its results are
those of ``run``."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model.bench.stub_device import stub_runner
from model.execution.runner import ModelRunner
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import NOT_FINITE, DecodeChunks, SequenceChunk
from model.network.forward_batch import ForwardBatch
from model.network.gemma3 import Gemma3
from model.network.pending_step import PendingStep
from model.ops.reference import ReferenceOps
from server.bench.engine_overhead import decoding_core
from tests.model.harness import GREEDY, Harness, TestSequence
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


class _RefuseWaiting(TorchDispatchMode):
    is_armed = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_armed and func.overloadpacket.__name__ in WAITING_OPERATIONS:
            raise WaitedError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def refusing_to_wait(ops: Any = None) -> Iterator[None]:
    """Whoever asks for a number of the device's gets an error, except within a draw of ``ops``: that is a
    backend's business."""
    trap = _RefuseWaiting()

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


def prefilled(model: Gemma3, settings: list[SamplingParams]) -> tuple[Harness, list[SequenceChunk]]:
    """Sequences whose next step is a decode."""
    harness = Harness(model, model.ops, block_size=16, num_tokens=400, num_seqs=len(settings))
    sequences = [TestSequence(random_prompt(20 + i, seed=i), sampling) for i, sampling in enumerate(settings)]
    harness.run([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    return harness, [harness.chunk(sequence, 1) for sequence in sequences]


@pytest.mark.parametrize(
    "settings", [[GREEDY] * 3, [SAMPLED] * 3, [TOP_K] * 3, [GREEDY, SAMPLED, TOP_K, GREEDY]]
)
def test_nothing_that_the_device_computes_is_waited_for_before_the_results(
    model: Gemma3, settings: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, chunks = prefilled(model, settings)
    expected = harness.runner.run(chunks)
    # What the network itself does on a device is its backend's business; here it has been done before.
    computed = harness.runner._forward(chunks)
    monkeypatch.setattr(harness.runner, "_forward", lambda _: computed)
    harness.runner.sampler.may_wait = False
    with refusing_to_wait(harness.runner.ops):
        pending = harness.runner.launch(chunks)
    assert list(pending.results()) == list(expected)


def test_the_batch_of_a_decode_step_is_laid_out_without_waiting() -> None:
    core = decoding_core(stub_runner(), stub_runner().spec, [33] * 5, temperature=1.0)
    chunks = core._chunks(core.scheduler.schedule())
    assert isinstance(chunks, DecodeChunks)
    with refusing_to_wait():
        pending = stub_runner().launch(chunks)
    assert len(pending.results()) == 5


@pytest.mark.parametrize("subset", [False, True])
def test_a_step_that_takes_the_tokens_of_the_last_one_is_launched_without_waiting(subset: bool) -> None:
    runner = stub_runner()
    core = decoding_core(runner, runner.spec, [33] * 5, temperature=1.0, async_scheduling=True)
    for _ in range(3):
        core.step()
    if subset:
        core.abort("2")
    before = core._ahead
    assert before is not None
    with refusing_to_wait():
        after = core._launch_ahead(before)
    assert after is not None
    assert len(after.batch.decodes) == (4 if subset else 5)


def test_tables_are_kept_on_the_device_while_steps_are_launched_ahead() -> None:
    runner = stub_runner()
    core = decoding_core(runner, runner.spec, [33] * 5, async_scheduling=True)
    kept = []
    for _ in range(100):
        core.step()
        tables = core._decode_chunks.scratch["tables"]
        if not any(tables is other for other in kept):
            kept.append(tables)
    assert len(kept) == 1
    assert core._ahead is not None


def test_tokens_go_on_as_they_were_drawn_and_those_that_are_none_do_no_harm() -> None:
    pending = PendingStep(None, drawn=torch.tensor([7, -1, 9]))
    assert pending.token_ids(None).tolist() == [7, 0, 9]
    assert pending.token_ids(torch.tensor([2, 0])).tolist() == [9, 7]
    results = pending.results()
    assert [result.token_ids for result in results] == [[7], [], [9]]
    assert results[1].error == NOT_FINITE


def test_a_step_that_waits_is_noticed(model: Gemma3) -> None:
    harness, chunks = prefilled(model, [replace(SAMPLED, logprobs=1)])
    with refusing_to_wait(), pytest.raises(WaitedError):
        harness.runner.launch(chunks)


def test_a_row_that_is_not_finite_fails_alone_without_being_waited_for(model: Gemma3) -> None:
    harness, chunks = prefilled(model, [SAMPLED, GREEDY, TOP_K])
    expected = harness.runner.run(chunks)
    harness.runner.sampler.may_wait = False
    assert list(harness.runner.run(chunks)) == list(expected)
    harness.cache.layers[0].values[chunks[1].local_block_table[0], 3] = math.inf
    results = harness.runner.run(chunks)
    assert (results[0], results[2]) == (expected[0], expected[2])
    assert results[1].error == NOT_FINITE


def test_the_arrays_of_decodes_give_in_every_step_what_their_chunks_give() -> None:
    """From the engine's arrays, with tables that are kept and changed from step to step, and from the chunks
    that these make."""
    runner, fresh = stub_runner(), stub_runner()
    core = decoding_core(runner, runner.spec, [5, 40, 17, 33, 900], temperature=1.0)
    forward = runner._forward
    steps = []

    def checked(chunks: Sequence[SequenceChunk]) -> tuple[ForwardBatch, torch.Tensor]:
        assert isinstance(chunks, DecodeChunks)
        batch, hidden = forward(chunks)
        compare(batch, chunks, fresh)
        steps.append(id(chunks.scratch["tables"]))
        return batch, hidden

    runner._forward = checked  # type: ignore[method-assign]
    for _ in range(700):
        core.step()
    assert core.stats.recycled_blocks_total > 40
    assert 1 < len(set(steps)) < 10, (
        "tables are copied anew when they have become too narrow, and not in every step"
    )


def compare(from_arrays: ForwardBatch, chunks: DecodeChunks, runner: ModelRunner) -> None:
    for given in (list(chunks), [replace(chunk, tables=None) for chunk in chunks]):
        from_chunks, _ = runner._forward(given)
        assert from_arrays.first_rows == from_chunks.first_rows
        assert from_arrays.token_ids.equal(from_chunks.token_ids)
        assert from_arrays.positions.equal(from_chunks.positions)
        for name in ("global_attention", "local_attention"):
            one, other = getattr(from_arrays, name), getattr(from_chunks, name)
            assert (one.query_lens, one.context_lens, one.window) == (
                other.query_lens,
                other.context_lens,
                other.window,
            )
            for field in ("query_start", "context_lens_tensor", "slot_mapping"):
                assert getattr(one, field).equal(getattr(other, field)), field
            width = other.block_table.shape[1]
            assert one.block_table[:, :width].equal(other.block_table)
            assert not one.block_table[:, width:].any()
            assert one.block_table.is_contiguous()
    assert (
        chunks.positions.tolist()
        == [chunk.position for chunk in chunks]
        == [len(chunk.output_token_ids) for chunk in chunks]
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_step_is_launched_without_waiting() -> None:
    with torch.inference_mode():
        model = Gemma3(CONFIG, ReferenceOps(torch.device("cuda"), torch.float32), CONFIG.vocab_size)
        model.load_weights(random_tensors(model, 0).items())
    harness, chunks = prefilled(model, [GREEDY, GREEDY])
    computed = harness.runner._forward(chunks)
    expected = harness.runner.run(chunks)
    harness.runner._forward = lambda _: computed  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = harness.runner.launch(chunks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert list(pending.results()) == list(expected)
