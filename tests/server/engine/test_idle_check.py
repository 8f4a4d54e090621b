"""What the engine checks of itself when nothing is left to do, without the debug flag: cheap, and enough to
notice a leak."""

import pytest

from tests.server.engine.harness import Harness


def make_harness() -> Harness:
    harness = Harness()
    harness.core._debug_invariants = False
    return harness


def test_a_leaked_block_is_noticed_as_soon_as_nothing_runs() -> None:
    for pool in ("global_pool", "local_pool"):
        harness = make_harness()
        getattr(harness.kv, pool).allocate(1)
        harness.add([1, 2, 3])
        with pytest.raises(AssertionError, match="blocks are held while nothing runs"):
            harness.run()


def test_the_end_of_an_answer_never_waits_for_a_walk_over_the_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = make_harness()

    def walk(self: object) -> None:
        raise AssertionError("a walk over all blocks")

    monkeypatch.setattr("server.engine.kv.kv_manager.KVCacheManager.check_invariants", walk)
    first, second = harness.add([1, 2, 3]), harness.add([4, 5])
    harness.core.abort(second)
    harness.run()
    assert harness.finish_reason(first) == "length"


def test_waiting_copies_of_a_prompt_are_not_looked_up_again_until_the_block_they_wait_for_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(max_num_batched_tokens=16, num_global_blocks=257, max_num_seqs=4)
    prompt = list(range(64))
    requests = [harness.add(prompt, max_tokens=1) for _ in range(20)]
    lookups = 0
    find_hit = harness.kv.get_computed_blocks

    def counted(request):  # type: ignore[no-untyped-def]
        nonlocal lookups
        lookups += 1
        return find_hit(request)

    monkeypatch.setattr(harness.kv, "get_computed_blocks", counted)
    harness.step()
    assert lookups == 20
    for _ in range(2):
        harness.step()
    assert lookups == 20
    harness.core.abort(requests[0])  # the one that computed: another one takes over, the rest waits for that
    harness.run()
    assert all(len(harness.tokens(request)) == 1 for request in requests[1:])
    assert harness.runner.num_computed[tuple(prompt[:40])] == 1
