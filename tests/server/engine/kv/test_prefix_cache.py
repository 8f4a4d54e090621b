"""Prefix caching over both pools: what may hit, what must not, and what is computed only once."""

import pytest

from model.interface.sampling_params import SamplingParams
from server.engine.kv import block_hashes
from server.engine.request import EngineRequest, Request, RequestTimings
from tests.server.engine.harness import Harness, expected_tokens
from tests.server.engine.scheduler.test_scheduler import prompt


@pytest.mark.parametrize("length", [4, 8, 12, 16, 32, 33, 64])
def test_an_identical_prompt_hits_up_to_its_last_full_block_and_recomputes_at_least_one_token(
    length: int,
) -> None:
    engine = Harness()
    tokens = []
    for _ in range(3):
        request = engine.add(prompt(length), max_tokens=5)
        engine.run()
        tokens.append(engine.tokens(request))
        cached = engine.outputs[request][0].num_cached_tokens
    assert tokens == [expected_tokens(prompt(length), 5)] * 3
    assert cached == (length - 1) // 4 * 4


def test_two_copies_sent_at_once_compute_their_prefix_once() -> None:
    engine = Harness(max_num_batched_tokens=16, num_global_blocks=300)
    requests = [engine.add(prompt(100), max_tokens=3) for _ in range(4)]
    engine.run()
    assert [engine.outputs[r][0].num_cached_tokens for r in requests] == [0, 96, 96, 96]
    for request in requests:
        assert engine.tokens(request) == expected_tokens(prompt(100), 3)
    counts = [engine.runner.num_computed[tuple(prompt(100)[:n])] for n in range(1, 97)]
    assert counts == [1] * 96


def test_a_request_that_shares_only_a_beginning_waits_only_for_that() -> None:
    engine = Harness(max_num_batched_tokens=16, num_global_blocks=300)
    long = engine.add(prompt(200), max_tokens=2)
    engine.step()
    short = engine.add([*prompt(24), 500, 501, 502], max_tokens=2)
    while not engine.outputs[short]:
        engine.step()
    assert engine.outputs[short][0].num_cached_tokens == 24
    assert engine.outputs[long] == []
    engine.run()


def test_a_waiting_copy_starts_over_when_the_one_it_waits_for_is_aborted() -> None:
    engine = Harness(max_num_batched_tokens=8, num_global_blocks=300)
    first = engine.add(prompt(100), max_tokens=2)
    second = engine.add(prompt(100), max_tokens=2)
    engine.step()
    engine.core.abort(first)
    engine.run()
    assert engine.tokens(second) == expected_tokens(prompt(100), 2)
    assert engine.outputs[second][0].num_cached_tokens == 8


def test_the_next_turn_of_a_chat_hits_up_to_the_last_full_block_of_the_turn_before() -> None:
    engine = Harness(num_global_blocks=300)
    first = engine.add(prompt(30), max_tokens=21)
    engine.run()
    conversation = prompt(30) + engine.tokens(first)
    second = engine.add([*conversation, 7, 8, 9], max_tokens=2)
    engine.run()
    computed = len(conversation) - 1  # the last token was sampled, never run
    assert engine.outputs[second][0].num_cached_tokens == computed // 4 * 4


def test_a_hit_needs_the_window_in_the_local_pool_too() -> None:
    # a local pool of 6 blocks
    engine = Harness(num_global_blocks=300, max_num_seqs=1, max_num_batched_tokens=8)
    first = engine.add(prompt(40), max_tokens=1)
    engine.run()
    for i in range(3):
        engine.add(prompt(40, 50 + i), max_tokens=1)
        engine.run()
    again = engine.add(prompt(40), max_tokens=3)
    engine.run()
    assert engine.outputs[again][0].num_cached_tokens == 0
    assert engine.core.stats.prefix_limited_total["local"] >= 1
    assert engine.tokens(again)[:1] == engine.tokens(first)


def test_a_local_block_lost_in_the_middle_shortens_the_hit_to_before_it() -> None:
    engine = Harness(num_global_blocks=300, max_num_seqs=4)
    engine.add(prompt(40), max_tokens=1)
    engine.run()
    kv = engine.kv
    probe = engine.add(prompt(40), max_tokens=2)
    (request,) = engine.core.scheduler.waiting
    assert kv.get_computed_blocks(request).num_tokens == 36
    lost = kv.local_pool.find(kv.block_hashes(request, 9)[8])
    assert lost is not None
    kv.local_pool._forget_hash(lost)
    del kv.local_pool._cached[lost]
    kv.local_pool._blank.append(lost)
    hit = kv.get_computed_blocks(request)
    assert (hit.num_tokens, hit.limited_by, len(hit.local_blocks)) == (32, "local", 2)
    engine.run()
    assert engine.tokens(probe) == expected_tokens(prompt(40), 2)


def test_requests_with_different_salts_share_nothing() -> None:
    engine = Harness()
    cached = []
    for salt in (None, "a", "b", "a"):
        request = engine.add(prompt(33), max_tokens=1, salt=salt)
        engine.run()
        cached.append(engine.outputs[request][0].num_cached_tokens)
    assert cached == [0, 0, 0, 32]


def test_without_prefix_caching_nothing_hits_and_all_blocks_are_blank_afterwards() -> None:
    engine = Harness(prefix_caching=False)
    for _ in range(2):
        request = engine.add(prompt(33), max_tokens=4)
        engine.run()
        assert engine.outputs[request][0].num_cached_tokens == 0
    assert engine.kv.global_pool.num_cached == engine.kv.local_pool.num_cached == 0


def test_unhashed_blocks_are_reused_before_cached_ones_and_the_oldest_cached_first() -> None:
    engine = Harness(num_global_blocks=13)  # 12 blocks
    engine.add(prompt(16, 1), max_tokens=1)
    engine.run()
    engine.add(prompt(16, 2), max_tokens=1)
    engine.run()
    assert engine.kv.global_pool.num_cached == 8
    engine.add(prompt(15, 3), max_tokens=1)  # 4 blocks: the blank ones
    engine.run()
    assert engine.kv.global_pool.num_evicted == 0
    engine.add(prompt(15, 4), max_tokens=1)
    engine.run()
    assert engine.kv.global_pool.num_evicted > 0
    newer = engine.add(prompt(16, 2), max_tokens=1)
    engine.run()
    assert engine.outputs[newer][0].num_cached_tokens == 12


def test_a_prompt_that_wants_logprobs_is_computed_in_full_and_gets_every_entry() -> None:
    engine = Harness()
    engine.add(prompt(33), max_tokens=1)
    engine.run()
    request = engine.add(prompt(33), max_tokens=1, prompt_logprobs=0)
    engine.run()
    (output,) = engine.outputs[request]
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert [entry.token_id for entry in output.prompt_logprobs] == prompt(33)[1:]


def test_the_hash_chain_covers_parent_tokens_and_salt() -> None:
    engine = Harness(num_global_blocks=300)

    def chain(tokens: list[int], salt: str | None = None) -> list[bytes]:
        request_id = engine.add(tokens, max_tokens=1, salt=salt)
        request = engine.core.scheduler.requests[request_id]
        return list(engine.kv.block_hashes(request, len(tokens) // 4))

    a, b, c = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]
    assert chain(a + b)[1] != chain(c + b)[1]  # same tokens, other parent
    assert chain(a + a)[0] != chain(a + a)[1]  # same tokens, other position
    assert chain(a)[0] != chain(a, "salt")[0]
    assert chain(a + b) == chain(a + b)
    assert all(len(digest) == 32 for digest in chain(a + b))
    engine.run()


def test_hits_survive_preemption_pressure_and_stay_exact() -> None:
    engine = Harness(num_global_blocks=24, over_admission=True)
    shared = prompt(20)
    requests = [engine.add([*shared, i, i + 1], max_tokens=25) for i in range(8)]
    engine.run()
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens([*shared, i, i + 1], 25)
    assert engine.core.stats.preemptions_total > 0
    assert engine.core.stats.prefix_hit_tokens_total > 0


def test_hash_function_is_a_cryptographic_one() -> None:
    assert block_hashes.hash_block(b"a", b"b") != block_hashes.hash_block(b"b", b"a")


def test_a_block_that_was_announced_and_is_filled_by_a_decode_is_awaited_no_longer() -> None:
    """As of a preempted request, all but the last of whose tokens came in chunks."""
    kv = Harness().kv
    request = Request(EngineRequest("r", prompt(8, 0), SamplingParams(max_tokens=4)), RequestTimings(0.0))
    request.row = kv.batch.add(request.token_ids, 8, request.sampling)
    kv.admit(request, kv.get_computed_blocks(request))
    assert kv.allocate_slots(request.row, 8)
    kv.cache_full_blocks([request], [7])
    assert len(kv._announced) == 1
    kv.cache_full_blocks([request], [8])
    assert not kv._announced
    assert not kv.record(request).announced
    assert kv.record(request).num_cached_blocks == 2
    kv.check_invariants([request])
