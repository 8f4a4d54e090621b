"""Rules of the engine, each shown with a runner that verifies every key it would read."""

import numpy as np
import pytest

from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.running_batch import RunningBatch
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import ChunkResult, StepInput, StepResult
from server.engine.core import EngineCore
from server.engine.kv.kv_manager import KVCacheManager
from server.engine.request import EngineRequest, RequestStatus
from server.engine.scheduler.scheduler import SchedulerConfig
from tests.server.engine.harness import Harness, expected_tokens


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start * 7919 + i * 31) % 997 for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 31, 32, 33, 64])
@pytest.mark.parametrize("chunk", [1, 3, 4, 32])
def test_tokens_do_not_depend_on_the_chunk_size(length: int, chunk: int) -> None:
    engine = Harness(max_num_batched_tokens=chunk, max_num_seqs=1)
    request = engine.add(prompt(length), max_tokens=20)
    engine.run()
    assert engine.tokens(request) == expected_tokens(prompt(length), 20)
    assert engine.finish_reason(request) == "length"


@pytest.mark.parametrize("block_size", [1, 2, 4, 8])
def test_tokens_do_not_depend_on_the_block_size(block_size: int) -> None:
    engine = Harness(block_size=block_size, num_global_blocks=200 // block_size)
    requests = [engine.add(prompt(length, length), max_tokens=15) for length in (1, 9, 17, 30)]
    engine.run()
    for request, length in zip(requests, (1, 9, 17, 30), strict=True):
        assert engine.tokens(request) == expected_tokens(prompt(length, length), 15)


def test_a_growing_request_holds_a_constant_number_of_local_blocks_while_recycling_rises() -> None:
    engine = Harness(block_size=4, window=8, num_global_blocks=300)
    engine.add(prompt(40), max_tokens=400)
    held, recycled = set(), []
    while engine.core.has_work:
        engine.step()
        if engine.core.scheduler.running and engine.outputs["r0"]:
            request = engine.core.scheduler.running[0]
            held.add(engine.spec.blocks(engine.num_computed(request), 1).local_blocks)
            assert (
                engine.kv.local_pool.num_used
                <= engine.spec.blocks(engine.num_computed(request), 1).local_blocks
            )
            recycled.append(engine.core.stats.recycled_blocks_total)
    assert held == {8 // 4 + 1}
    assert recycled == sorted(recycled)
    assert recycled[-1] >= 100


def test_sixteen_requests_finish_and_give_every_block_back() -> None:
    engine = Harness(num_global_blocks=200, prefix_caching=False)
    requests = [engine.add(prompt(5 + 3 * i, i), max_tokens=10 + i) for i in range(16)]
    engine.run()
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens(prompt(5 + 3 * i, i), 10 + i)
    assert engine.kv.global_pool.num_free == engine.kv.global_pool.num_usable
    assert engine.kv.local_pool.num_free == engine.kv.local_pool.num_usable


def test_decodes_and_prefills_share_a_step_and_running_streams_move_in_every_step() -> None:
    engine = Harness(num_global_blocks=300, max_num_batched_tokens=16)
    stream = engine.add(prompt(3), max_tokens=60)
    engine.step()
    engine.add(prompt(200, 2), max_tokens=2)
    while len(engine.tokens(stream)) < 60:
        before = len(engine.tokens(stream))
        engine.step()
        assert len(engine.tokens(stream)) == before + 1
        assert sum(len(chunk.token_ids) for chunk in engine.runner.steps[-1]) <= 16
    assert engine.core.stats.steps_total["mixed"] >= 12


def test_a_short_request_beside_a_long_prefill_starts_before_that_prefill_ends() -> None:
    engine = Harness(num_global_blocks=600, max_num_batched_tokens=32)
    long = engine.add(prompt(2000), max_tokens=1)
    engine.step()
    short = engine.add(prompt(5, 3), max_tokens=4)
    while engine.num_uncomputed(engine.core.scheduler.running[0]) > 32 and len(engine.tokens(short)) < 4:
        engine.step()
    assert len(engine.tokens(short)) == 4
    assert engine.outputs[long] == []
    engine.run()


def test_a_long_request_gets_in_and_ends_under_a_steady_flow_of_short_ones() -> None:
    engine = Harness(num_global_blocks=400, max_num_seqs=4, max_num_batched_tokens=32)
    for i in range(6):
        engine.add(prompt(6, i), max_tokens=5)
    long = engine.add(prompt(500, 99), max_tokens=3)
    steps = 0
    while not engine.outputs[long] or engine.finish_reason(long) is None:
        engine.add(prompt(6, 100 + steps), max_tokens=5)
        engine.step()
        steps += 1
        assert steps < 200, "the long request is starved"
    for request in list(engine.core.scheduler.running):
        engine.core.abort(request.request_id)


def test_waiting_requests_are_admitted_first_come_first_served() -> None:
    engine = Harness(max_num_seqs=1)
    order = [engine.add(prompt(5, i), max_tokens=2) for i in range(5)]
    finished: list[str] = []
    while engine.core.has_work:
        engine.step()
        finished += [r for r in order if r not in finished and engine.outputs[r] and engine.finish_reason(r)]
    assert finished == order


def test_admission_waits_until_the_whole_prompt_fits_and_never_when_nothing_runs() -> None:
    engine = Harness(num_global_blocks=17, prefix_caching=False)  # 64 tokens
    first = engine.add(prompt(30), max_tokens=8)
    second = engine.add(prompt(50, 2), max_tokens=4)
    engine.step()
    assert [r.request_id for r in engine.core.scheduler.running] == [first]
    engine.run()
    assert engine.core.stats.preemptions_total == 0
    assert engine.tokens(second) == expected_tokens(prompt(50, 2), 4)
    whole = engine.add(prompt(63, 3), max_tokens=1)
    engine.run()
    assert len(engine.tokens(whole)) == 1


def test_preempted_requests_resume_with_the_same_tokens_logprobs_and_counts() -> None:
    alone = {}
    for i in range(6):
        engine = Harness(num_global_blocks=200)
        request = engine.add(prompt(10, i), max_tokens=30, seed=i, logprobs=0, prompt_logprobs=0)
        engine.run()
        alone[i] = engine.outputs[request]
    engine = Harness(num_global_blocks=20)  # 76 tokens for six requests of 40
    requests = [
        engine.add(prompt(10, i), max_tokens=30, seed=i, logprobs=0, prompt_logprobs=0) for i in range(6)
    ]
    engine.run()
    assert engine.core.stats.preemptions_total > 0
    for i, request in enumerate(requests):
        for field in ("token_ids", "logprobs", "prompt_logprobs", "finish_reason", "num_cached_tokens"):
            assert [getattr(o, field) for o in engine.outputs[request]] == [
                getattr(o, field) for o in alone[i]
            ]
    assert any(engine.outputs[r][-1].timings.num_preemptions for r in requests)


def test_two_long_prompts_do_not_evict_each_other_for_ever() -> None:
    engine = Harness(num_global_blocks=33, max_num_batched_tokens=8)  # 128 tokens
    requests = [engine.add(prompt(100, i), max_tokens=20) for i in (1, 2)]
    engine.run(max_steps=200)
    for i, request in zip((1, 2), requests, strict=True):
        assert engine.tokens(request) == expected_tokens(prompt(100, i), 20)
    assert engine.core.stats.preemptions_total == 0


def test_no_request_is_admitted_in_a_step_that_preempted() -> None:
    engine = Harness(num_global_blocks=20, over_admission=True, prefix_caching=False)
    for i in range(6):
        engine.add(prompt(10, i), max_tokens=30)
    while engine.core.has_work:
        before = engine.core.stats.preemptions_total
        was_waiting = {r.request_id for r in engine.core.scheduler.waiting}
        engine.step()
        if engine.core.stats.preemptions_total > before:
            assert not was_waiting & {r.request_id for r in engine.core.scheduler.running}
    assert engine.core.stats.preemptions_total > 0


@pytest.mark.parametrize(
    "phase", ["queued", "half prefilled", "decoding", "preempted", "finished", "unknown"]
)
def test_abort_works_in_every_phase_and_is_idempotent(phase: str) -> None:
    engine = Harness(num_global_blocks=20, max_num_seqs=2, max_num_batched_tokens=8, over_admission=True)
    first = engine.add(prompt(30, 1), max_tokens=30)
    second = engine.add(prompt(30, 2), max_tokens=30)
    third = engine.add(prompt(5, 3), max_tokens=3)
    target = {
        "queued": third,
        "half prefilled": first,
        "decoding": first,
        "preempted": second,
        "finished": first,
    }.get(phase, "?")
    statuses = {r.request_id: r for r in [*engine.core.scheduler.waiting]}
    if phase == "half prefilled":
        engine.step()
        assert 0 < engine.num_computed(statuses[first]) < 30
    elif phase == "decoding":
        while not engine.outputs[first]:
            engine.step()
    elif phase == "preempted":
        while statuses[second].status is not RequestStatus.PREEMPTED:
            engine.step()
    elif phase == "finished":
        while not engine.outputs[first] or engine.finish_reason(first) is None:
            engine.step()
    engine.core.abort(target)
    engine.core.abort(target)
    engine.run()
    assert engine.kv.global_pool.num_used == engine.kv.local_pool.num_used == 0
    for request, start, count in ((first, 1, 30), (second, 2, 30), (third, 3, 3)):
        if request != target:
            assert engine.tokens(request) == expected_tokens(prompt(30 if count == 30 else 5, start), count)


def test_stop_tokens_end_a_request_and_count_as_generated() -> None:
    tokens = expected_tokens(prompt(6), 10)
    engine = Harness()
    request = engine.add(prompt(6), max_tokens=10, stop_token_ids=frozenset({tokens[4]}))
    engine.run()
    assert engine.tokens(request) == tokens[: tokens.index(tokens[4]) + 1]
    assert engine.finish_reason(request) == "stop"
    assert engine.outputs[request][-1].stop_token_id == tokens[4]


def test_a_sequence_ends_with_length_at_the_model_limit() -> None:
    engine = Harness(max_model_len=20)
    request = engine.add(prompt(15), max_tokens=100)
    engine.run()
    assert len(engine.tokens(request)) == 5
    assert engine.finish_reason(request) == "length"


def test_max_tokens_zero_computes_the_prompt_and_yields_one_output_without_tokens() -> None:
    engine = Harness(max_num_batched_tokens=8)
    request = engine.add(prompt(21), max_tokens=0, prompt_logprobs=0)
    engine.run()
    (output,) = engine.outputs[request]
    assert (output.token_ids, output.finish_reason) == ([], "length")
    assert output.prompt_logprobs is not None
    assert [entry.token_id for entry in output.prompt_logprobs] == prompt(21)[1:]
    assert [entry.logprob for entry in output.prompt_logprobs] == [-float(i) for i in range(20)]


def test_the_prefill_share_of_a_mixed_step_follows_its_measured_cost() -> None:
    engine = Harness(num_global_blocks=600, max_num_batched_tokens=64)
    engine.core.scheduler.budget.mixed_prefill_tokens = 8
    engine.add(prompt(3), max_tokens=5)
    engine.step()
    engine.add(prompt(50, 2), max_tokens=1)
    engine.step()
    assert sum(len(chunk.token_ids) for chunk in engine.runner.steps[-1]) == 9
    engine.run()


class FastRunner:
    """Tokens without a network and without checks, for very long sequences."""

    def run(self, step: StepInput) -> StepResult:
        others = {i: ChunkResult() for i, chunk in enumerate(step.prefills) if not chunk.samples}
        return StepResult(np.pad(step.starts % 1000, (0, len(step.prefills))), others)


def test_from_1k_to_30k_tokens_one_request_holds_the_same_number_of_local_blocks() -> None:
    """The window and blocks of the 270M. Each decode step holds W / B + 1 local blocks, and what recycling
    frees is reused."""
    spec = KVCacheSpec(16, 512, num_global_layers=3, num_local_layers=15, bytes_per_token_per_layer=1024)
    batch = RunningBatch(1, 30_100 // 16 + 1)
    kv = KVCacheManager(spec, batch, 30_100 // 16 + 2, spec.local_pool_blocks(1, 512), prefix_caching=False)
    core = EngineCore(FastRunner(), kv, SchedulerConfig(1, 512, 30_000))
    core.add(EngineRequest("long", [2] * 1000, SamplingParams(max_tokens=29_000)))
    while core.stats.num_running == 0 or core.scheduler.running[0].num_output_tokens == 0:
        core.step()
    request = core.scheduler.running[0]
    recycled_before = core.stats.recycled_blocks_total
    held, rises = set(), 0
    while core.has_work:
        before = core.stats.recycled_blocks_total
        core.step()
        if core.has_work:
            computed = int(batch.num_computed_tokens[request.row])
            # After the step the tail has moved already: what it held while running is what it holds plus what
            # it gave back.
            held.add(kv.local_pool.num_used + core.stats.recycled_blocks_total - before)
            assert kv.global_pool.num_used == -(-computed // 16)
            rises += core.stats.recycled_blocks_total > before
    assert request.num_tokens == 30_000
    assert held == {512 // 16 + 1}
    assert rises == core.stats.recycled_blocks_total - recycled_before == 29_000 // 16
    assert kv.local_pool.num_used == kv.global_pool.num_used == 0
