"""Steps that are launched before the results of the one before them are read: requests get what they get
without, token for token, whatever ends, fails, leaves or comes meanwhile; and no block is given away while a
step that uses it is under way."""

import argparse
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from model.interface.sequence_chunk import NOT_FINITE, StepInput
from server.engine.core import EngineCore
from server.engine.request import Request, RequestFailedError
from server.engine.scheduler.scheduler import Scheduler
from server.loading.load import schedules_ahead
from server.settings.settings import add_arguments, load_settings
from tests.server.engine.harness import Harness, LazyRunner, expected_tokens, next_token
from tests.server.engine.scheduler.test_scheduler import prompt

STOPS = frozenset(range(40))  # of 1000: one token in 25


def until_stop(tokens: list[int], stops: frozenset[int] = STOPS) -> list[int]:
    end = next((index + 1 for index, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[:end]


def num_launched_ahead(engine: Harness) -> int:
    assert isinstance(engine.runner, LazyRunner)
    return engine.runner.num_launched_ahead


def ahead(**arguments: Any) -> Harness:
    return Harness(async_scheduling=True, **arguments)


def first_decode(engine: Harness, count: int = 4, max_tokens: int = 30, **sampling: Any) -> list[str]:
    """Requests that all decode, with a step ahead under way."""
    requests = [engine.add(prompt(5 + i, i), max_tokens=max_tokens, **sampling) for i in range(count)]
    while num_launched_ahead(engine) < 2:
        engine.step()
    assert engine.core._launched
    return requests


# -- whole runs ----------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """Requests that come, and what happens to them, by what they have got so far: the same however long the
    steps take."""

    prompts: list[list[int]]
    settings: list[dict[str, Any]]
    abort_after: dict[int, int] = field(default_factory=dict)  # index -> outputs


def random_plan(seed: int, count: int = 30) -> Plan:
    choose = random.Random(seed)
    shared = prompt(40, 99)
    plan = Plan([], [])
    for index in range(count):
        plan.prompts.append(shared[: choose.randrange(40)] + prompt(choose.randrange(1, 12), index))
        settings: dict[str, Any] = {
            "max_tokens": choose.randrange(1, 40),
            "stop_token_ids": STOPS,
            "seed": index,
        }
        if choose.random() < 0.1:
            settings["logprobs"] = 1
        if choose.random() < 0.1:
            settings["priority"] = choose.choice((-1, 1))
        plan.settings.append(settings)
        if choose.random() < 0.2:
            plan.abort_after[index] = choose.randrange(1, 15)
    return plan


def carry_out(plan: Plan, engine: Harness, *, steps_between: int) -> tuple[list[list[int]], list[Any]]:
    """Tokens, and how each ended."""
    names = [f"q{index}" for index in range(len(plan.prompts))]
    waiting = list(range(len(names)))
    aborted = set()
    num_steps = 0
    while waiting or engine.core.has_work:
        if waiting and num_steps % steps_between == 0:
            index = waiting.pop(0)
            engine.add(plan.prompts[index], request_id=names[index], **plan.settings[index])
        engine.step()
        num_steps += 1
        for index, count in plan.abort_after.items():
            outputs = engine.outputs.get(names[index], [])
            if len(outputs) >= count and index not in aborted:
                engine.core.abort(names[index])
                aborted.add(index)
    ends = [
        str(engine.errors[name])
        if name in engine.errors
        else (engine.outputs[name][-1].finish_reason, engine.outputs[name][-1].stop_token_id)
        for name in names
    ]
    return [engine.tokens(name) for name in names], ends


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "pools",
    [{"num_global_blocks": 400}, {"num_global_blocks": 24, "over_admission": True}],
    ids=["room for all", "preemption"],
)
def test_every_request_gets_what_it_gets_without(seed: int, pools: dict[str, Any]) -> None:
    plan = random_plan(seed)
    engines = [Harness(async_scheduling=is_ahead, **pools) for is_ahead in (False, True)]
    for engine in engines:
        engine.runner.is_odd = lambda prefix: next_token(prefix, 7) < 20  # one row in 50 is not finite
    expected, actual = (carry_out(plan, engine, steps_between=3) for engine in engines)
    assert actual == expected
    assert {end for end in actual[1] if isinstance(end, str)} == {NOT_FINITE}
    assert {end[0] for end in actual[1] if isinstance(end, tuple)} == {"stop", "length", None}, (
        "None: aborted"
    )
    assert num_launched_ahead(engines[1]) > 20
    if "over_admission" in pools:
        assert engines[1].core.stats.preemptions_total > 0
    else:
        assert engines[0].kv.global_pool._by_hash.keys() == engines[1].kv.global_pool._by_hash.keys()
    sync, later = (engine.core.stats for engine in engines)
    assert sync.numerical_faults_total == later.numerical_faults_total


@pytest.mark.parametrize("memory", [1, 3, 5])
def test_a_device_with_little_memory_gives_the_same_tokens(memory: int) -> None:
    plan = random_plan(3, count=12)
    expected = carry_out(plan, Harness(num_global_blocks=400), steps_between=2)
    engine = ahead(num_global_blocks=400)
    engine.runner.memory = memory
    assert carry_out(plan, engine, steps_between=2) == expected
    assert engine.runner.num_refused > 0


# -- one thing at a time -------------------------------------------------------------------------------------


def test_while_all_decode_every_step_is_launched_before_the_results_of_the_last_one_are_read() -> None:
    engine = ahead()
    requests = first_decode(engine)
    before, steps = num_launched_ahead(engine), len(engine.runner.steps)
    for _ in range(10):
        engine.step()
    assert num_launched_ahead(engine) - before == len(engine.runner.steps) - steps == 10
    engine.run()
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens(prompt(5 + i, i), 30)
    # All end by length, at the same step: none is run for nothing.
    assert engine.runner.num_computed[(*prompt(5, 0), *expected_tokens(prompt(5, 0), 29))] == 1
    assert (*prompt(5, 0), *expected_tokens(prompt(5, 0), 30)) not in engine.runner.num_computed


def test_a_token_behind_the_end_is_neither_delivered_nor_counted_and_its_blocks_wait_for_its_step() -> None:
    engine = ahead()
    tokens = expected_tokens(prompt(6, 1), 30)
    stop = tokens[10]
    requests = first_decode(engine, stop_token_ids=frozenset({stop}))
    assert stop not in tokens[:10]
    while engine.core.stats.num_running == 4:
        engine.step()
    assert engine.tokens(requests[1]) == tokens[:11]
    assert engine.outputs[requests[1]][-1].finish_reason == "stop"
    assert engine.core.scheduler._held, "the step ahead still uses its blocks"
    assert engine.holds_blocks(requests[1])
    engine.step()
    assert not engine.core.scheduler._held
    assert not engine.holds_blocks(requests[1])
    assert (*prompt(6, 1), *tokens[:11]) in engine.runner.num_computed, (
        "what was drawn last was run, for nothing"
    )
    assert engine.core._launched, "the others are ahead again"
    engine.run()
    assert engine.tokens(requests[1]) == tokens[:11]
    for i in (0, 2, 3):
        assert engine.tokens(requests[i]) == until_stop(
            expected_tokens(prompt(5 + i, i), 30), frozenset({stop})
        )


def test_the_others_stay_ahead_when_one_ends() -> None:
    engine = ahead(max_num_seqs=4)
    first_decode(engine, max_tokens=40)
    short = next(iter(engine.core.scheduler.running))
    short.max_num_tokens = short.num_tokens + 3
    engine.kv.batch.max_num_tokens[short.row] = short.max_num_tokens
    engine.core.scheduler._num_until_longest = 0
    before, steps = num_launched_ahead(engine), len(engine.runner.steps)
    for _ in range(8):
        engine.step()
    assert engine.core.stats.num_running == 3
    assert num_launched_ahead(engine) - before == len(engine.runner.steps) - steps == 8


def test_the_last_request_of_all_ends_and_leaves_nothing() -> None:
    engine = ahead()
    tokens = expected_tokens(prompt(5, 0), 30)
    (request,) = first_decode(engine, count=1, stop_token_ids=frozenset({tokens[12]}))
    while not engine.outputs[request] or engine.finish_reason(request) is None:
        engine.step()
    is_under_way = engine.core.has_work
    assert is_under_way
    assert engine.core.stats.num_running == 0
    engine.step()
    assert not engine.core.has_work
    assert engine.kv.global_pool.num_used == engine.kv.local_pool.num_used == 0


def test_an_aborted_request_gets_nothing_more_and_its_id_may_be_used_again() -> None:
    engine = ahead()
    requests = first_decode(engine)
    got = engine.tokens(requests[0])
    engine.core.abort(requests[0])
    assert engine.holds_blocks(requests[0]), "the step ahead still uses its blocks"
    engine.add(prompt(9, 5), max_tokens=6, request_id=requests[0])
    engine.run()
    assert engine.tokens(requests[0]) == expected_tokens(prompt(9, 5), 6)
    assert got == expected_tokens(prompt(5, 0), 30)[: len(got)]
    for i in (1, 2, 3):
        assert engine.tokens(requests[i]) == expected_tokens(prompt(5 + i, i), 30)


def test_a_request_that_comes_is_admitted_right_after_the_step_ahead() -> None:
    engine = ahead()
    first_decode(engine)
    late = engine.add(prompt(8, 9), max_tokens=3)
    engine.step()
    assert not engine.core._launched, "nothing is launched before it"
    engine.step()
    assert engine.tokens(late) == expected_tokens(prompt(8, 9), 1)


def test_steps_are_launched_ahead_while_what_waits_cannot_be_admitted() -> None:
    engine = ahead(max_num_seqs=2)
    requests = [engine.add(prompt(5 + i, i), max_tokens=20) for i in range(4)]
    for _ in range(12):
        engine.step()
    assert engine.core.stats.num_waiting == 2
    assert num_launched_ahead(engine) > 8
    engine.run()
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens(prompt(5 + i, i), 20)


@pytest.mark.parametrize("full", [{"max_num_seqs": 2}, {"num_global_blocks": 21}], ids=["sequences", "pool"])
def test_steps_stay_ahead_while_others_queue_behind_what_cannot_be_admitted(full: dict[str, int]) -> None:
    """A server with more requests than it can run: one that comes in every step must not end the lead of the
    device."""
    engine = ahead(**full)
    requests = first_decode(engine, count=2, max_tokens=28)
    first = engine.add(prompt(60, 5), max_tokens=3)
    for _ in range(3):
        engine.step()
    assert engine.core.stats.num_waiting == 1
    before = num_launched_ahead(engine)
    behind = []
    for i in range(10):
        behind.append(engine.add(prompt(60, 6 + i), max_tokens=3))
        engine.step()
    assert engine.core.stats.num_waiting == 11
    assert num_launched_ahead(engine) - before == 10
    urgent = engine.add(prompt(6, 30), max_tokens=3, priority=-1)
    engine.step()
    if "max_num_seqs" not in full:
        engine.step()
        assert engine.tokens(urgent), "first in the queue, and small enough"
    engine.run()
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens(prompt(5 + i, i), 28)
    for i, request in enumerate([first, *behind]):
        assert engine.tokens(request) == expected_tokens(prompt(60, 5 + i), 3)


def test_whatever_waits_while_steps_are_ahead_could_not_be_admitted() -> None:
    plan = random_plan(4)
    limits: dict[str, Any] = {"num_global_blocks": 24, "max_num_seqs": 30}
    engine = ahead(**limits)
    scheduler, num_waited = engine.core.scheduler, 0
    schedule_ahead = scheduler._schedule_ahead

    def checked() -> StepInput | None:
        nonlocal num_waited
        following = schedule_ahead()
        if following is not None and scheduler.waiting:
            first = scheduler.waiting[0]
            hit = engine.kv.get_computed_blocks(first)
            assert not hit.pending
            assert not scheduler._fits(engine.kv.num_blocks_to_admit(hit, first.num_tokens))
            num_waited += 1
        return following

    scheduler._schedule_ahead = checked  # type: ignore[method-assign]
    assert carry_out(plan, engine, steps_between=2) == carry_out(plan, Harness(**limits), steps_between=2)
    assert num_waited > 20


def test_when_the_first_in_the_queue_leaves_the_next_is_not_forgotten() -> None:
    engine = ahead(num_global_blocks=21)
    first_decode(engine, count=2, max_tokens=28)
    large, small = engine.add(prompt(60, 5), max_tokens=3), engine.add(prompt(6, 6), max_tokens=3)
    for _ in range(3):
        engine.step()
    assert engine.core._launched
    assert not engine.tokens(small)
    engine.core.abort(large)
    for _ in range(4):
        engine.step()
    assert engine.tokens(small) == expected_tokens(prompt(6, 6), 3)


def test_a_prompt_that_is_half_done_is_not_forgotten_when_a_step_has_no_room_for_it() -> None:
    engine = ahead()
    first_decode(engine)
    late = engine.add(prompt(60, 9), max_tokens=1)
    while engine.core.stats.num_running < 5:
        engine.step()
    assert not engine.tokens(late)
    engine.core.scheduler.budget.max_step_tokens = 4
    for _ in range(15):
        engine.step()
    assert engine.tokens(late) == expected_tokens(prompt(60, 9), 1)


def test_the_times_of_steps_do_not_overlap() -> None:
    engine = ahead()
    first_decode(engine)
    engine.run()
    assert num_launched_ahead(engine) > 20
    assert engine.core.stats.busy_seconds_total <= engine.time


def test_what_waits_for_room_in_a_step_is_not_forgotten() -> None:
    """After a lack of memory, steps grow by a token each: the ones that decode must not stay ahead of what
    waits for that."""
    engine = ahead()
    first_decode(engine)
    engine.core.scheduler.budget.max_step_tokens = 4
    late = engine.add(prompt(8, 9), max_tokens=3)
    for _ in range(12):
        engine.step()
    assert engine.tokens(late) == expected_tokens(prompt(8, 9), 3)


def test_a_row_that_is_not_finite_ends_alone_and_its_block_is_not_published() -> None:
    engine = ahead()
    tokens = expected_tokens(prompt(6, 1), 30)
    odd = (*prompt(6, 1), *tokens[:10])  # 16 tokens: the last one fills a block
    engine.runner.is_odd = lambda prefix: prefix == odd
    requests = first_decode(engine)
    request = engine.core.scheduler.requests[requests[1]]
    engine.run()
    assert isinstance(engine.errors[requests[1]], RequestFailedError)
    assert engine.tokens(requests[1]) == tokens[:10]
    assert engine.core.stats.numerical_faults_total == 1
    hashes = engine.kv.block_hashes(request, 4)
    assert [engine.kv.global_pool.find(content_hash) is None for content_hash in hashes] == [
        False,
        False,
        False,
        True,
    ]
    for i in (0, 2, 3):
        assert engine.tokens(requests[i]) == expected_tokens(prompt(5 + i, i), 30)


@pytest.mark.parametrize("odd", [{"logprobs": 1}, {"presence_penalty": 0.5}, {"min_tokens": 3}])
def test_nothing_is_launched_ahead_of_one_that_wants_more_than_its_token(odd: dict[str, Any]) -> None:
    engine = ahead()
    requests = first_decode(engine)
    other = engine.add(prompt(7, 7), max_tokens=10, **odd)
    while not engine.outputs[other]:
        engine.step()
    before = num_launched_ahead(engine)
    while engine.finish_reason(other) is None:
        engine.step()
        assert not engine.core._launched or engine.finish_reason(other) is not None
    assert num_launched_ahead(engine) == before
    engine.run()
    assert num_launched_ahead(engine) > before
    assert engine.tokens(other) == expected_tokens(prompt(7, 7), 10)
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens(prompt(5 + i, i), 30)


def test_a_step_ahead_without_memory_is_run_in_parts_once_its_tokens_are_known() -> None:
    engine = ahead()
    requests = first_decode(engine)
    engine.runner.memory = 3
    engine.step()
    assert not engine.core._launched
    assert (engine.runner.num_refused, engine.core.stats.memory_faults_total) == (1, 0), (
        "what was given up is not counted"
    )
    engine.step()
    assert (engine.runner.num_refused, engine.core.stats.memory_faults_total) == (2, 1)
    engine.runner.memory = None
    engine.run()
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens(prompt(5 + i, i), 30)


def test_a_pool_without_room_for_the_step_ahead_preempts_only_once_the_tokens_are_known() -> None:
    engine = ahead(num_global_blocks=21, over_admission=True)
    requests = [engine.add(prompt(6, i), max_tokens=30) for i in range(4)]
    engine.run()
    assert engine.core.stats.preemptions_total > 0
    assert num_launched_ahead(engine) > 20
    for i, request in enumerate(requests):
        assert engine.tokens(request) == expected_tokens(prompt(6, i), 30)


@pytest.mark.parametrize(
    ("flags", "on_cpu", "on_cuda"),
    [
        ([], False, True),
        (["--async-scheduling"], True, True),
        (["--no-async-scheduling"], False, False),
        (["--async-scheduling", "--tensor-parallel-size", "2"], False, False),
    ],
)
def test_where_steps_are_launched_ahead(flags: list[str], on_cpu: bool, on_cuda: bool) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = load_settings(vars(parser.parse_args(flags)), {})
    assert (schedules_ahead(settings, "cpu"), schedules_ahead(settings, "cuda")) == (on_cpu, on_cuda)


def test_a_runner_that_only_runs_whole_steps_is_refused() -> None:
    engine = Harness()
    with pytest.raises(AssertionError, match="computes nothing beside the host"):
        EngineCore(engine.runner, engine.kv, engine.config, async_scheduling=True)


# -- planted faults ------------------------------------------------------------------------------------------


def free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Scheduler._finish

    def faulty(self: Scheduler, request: Request) -> None:
        in_flight, self._in_flight = self._in_flight, deque()
        finish(self, request)
        self._in_flight = in_flight

    monkeypatch.setattr(Scheduler, "_finish", faulty)


def take_rows_by_their_place(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_ahead = Scheduler._schedule_ahead

    def faulty(self: Scheduler) -> StepInput | None:
        step = schedule_ahead(self)
        if step is not None:
            step.decodes = np.arange(len(step))
        return step

    monkeypatch.setattr(Scheduler, "_schedule_ahead", faulty)


def add_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "_allocate_missing", lambda self, rows, num_tokens: True)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (free_at_once, "was freed before the step that uses it has run"),
        (take_rows_by_their_place, None),  # other tokens than expected
        (add_no_block, "range"),  # of the table: the step ahead has no block to write to
    ],
)
def test_a_planted_fault_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = random_plan(1)
    expected = carry_out(plan, Harness(num_global_blocks=400), steps_between=4)
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError), match=found):
        assert carry_out(plan, ahead(num_global_blocks=400), steps_between=4) == expected


def test_asking_for_it_with_tensor_parallelism_is_answered_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    several = {"tensor_parallel_size": 2}
    assert not schedules_ahead(load_settings(several, {}), "cuda")
    assert not caplog.messages
    assert not schedules_ahead(load_settings({**several, "async_scheduling": True}, {}), "cuda")
    assert caplog.messages == ["--async-scheduling has no effect with --tensor-parallel-size 2"]
