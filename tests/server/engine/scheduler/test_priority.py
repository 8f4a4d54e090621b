"""Priorities: the lowest number is started first and preempted last; among equals the first that came."""

from tests.server.engine.harness import Harness, expected_tokens


def add(harness: Harness, name: str, priority: int, max_tokens: int = 3, length: int = 6) -> str:
    return harness.add(
        [ord(name), *range(length - 1)], max_tokens=max_tokens, request_id=name, priority=priority
    )


def order_of_start(harness: Harness) -> list[str]:
    started = {name: outputs[0].timings.first_scheduled for name, outputs in harness.outputs.items()}
    assert None not in started.values()
    return sorted(started, key=lambda name: started[name] or 0.0)


def test_the_lowest_number_is_started_first_and_equals_in_order_of_arrival() -> None:
    harness = Harness(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 5), ("c", -3), ("d", 5), ("e", 0), ("f", -3), ("g", 2**63 - 1)):
        add(harness, name, priority)
    harness.run()
    assert order_of_start(harness) == list("cfaebdg")


def test_one_that_comes_later_overtakes_those_that_wait_and_not_those_that_run() -> None:
    harness = Harness(max_num_seqs=1)
    add(harness, "a", 9, max_tokens=5)
    harness.step()
    add(harness, "b", 1)
    add(harness, "c", 0)
    harness.run()
    assert order_of_start(harness) == list("acb")
    assert harness.outputs["a"][0].timings.num_preemptions == 0


def test_equal_priorities_are_first_come_first_served() -> None:
    harness = Harness(max_num_seqs=1)
    for name in "abcdef":
        add(harness, name, 7)
    harness.run()
    assert order_of_start(harness) == list("abcdef")


def test_the_highest_number_is_preempted_first_however_early_it_came() -> None:
    harness = Harness(num_global_blocks=17, over_admission=True)
    names = {"a": 9, "b": 0, "c": 0, "d": 9}
    for name, priority in names.items():
        add(harness, name, priority, max_tokens=20)
    harness.run()
    preemptions = {name: harness.outputs[name][0].timings.num_preemptions for name in names}
    assert preemptions["b"] == preemptions["c"] == 0
    assert preemptions["d"] > 0
    for name in names:  # and nobody's tokens depend on it
        assert harness.tokens(name) == expected_tokens([ord(name), *range(5)], 20)


def test_a_preempted_request_comes_back_before_equals_that_wait_and_after_the_more_urgent() -> None:
    harness = Harness(num_global_blocks=11, max_num_seqs=2, over_admission=True)
    add(harness, "a", 5, max_tokens=24)
    add(harness, "b", 5, max_tokens=24)
    harness.step()
    add(harness, "c", 5, max_tokens=1)
    while not harness.core.stats.preemptions_total:
        harness.step()
        harness.core.scheduler.write_stats()
    assert [request.request_id for request in harness.core.scheduler.waiting][:2] == ["b", "c"]
    add(harness, "u", 1, max_tokens=1)
    assert [request.request_id for request in harness.core.scheduler.waiting] == ["u", "b", "c"]
    harness.run()
