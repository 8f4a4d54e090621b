"""A plan at work on an engine that says what it is told to: the order of events, what counts, and how each
end is told."""

import asyncio
from typing import Any

import pytest

from model.interface.sampling_params import SamplingParams
from server.api.generation.plan import GenerationPlan, PromptPlan
from server.api.generation.run import ChoiceEvent, GenerationRun
from server.engine.request import EngineDrainingError, RequestExpiredError, RequestFailedError
from server.errors import ApiError, ClientDisconnectedError
from server.observability.request_metrics import RequestRecord
from tests.server.api.fakes import FakeEngine, output, server_state
from tests.server.text.small_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
A, B = TOKENIZER.encode_plain("a")[0], TOKENIZER.encode_plain("b")[0]


def plan(num_prompts: int = 1, n: int = 1, temperature: float = 1.0, **fields: Any) -> GenerationPlan:
    sampling = SamplingParams(max_tokens=8, temperature=temperature)
    prompts = tuple(PromptPlan([2, A], sampling, "a") for _ in range(num_prompts))
    return GenerationPlan("id-1", prompts, n, fields.pop("stop", ()), **fields)


class Run:
    """A run, its events so far, and what it counted."""

    def __init__(self, engine: FakeEngine, planned: GenerationPlan, **deadlines: Any) -> None:
        self.state = server_state(engine)
        self.record = RequestRecord(self.state.metrics, "completions", "id-1", "req-1")
        self.ticket = self.state.admission.ticket(8)
        self.ticket.admit(planned.num_sequences, planned.num_prompt_tokens)
        self.run = GenerationRun(
            self.state.require_loaded().engine, TOKENIZER, planned, self.record, self.ticket, **deadlines
        )
        self.events: list[ChoiceEvent] = []
        self.all_began = asyncio.Event()  # every choice has had an event
        self._num_choices = planned.num_choices
        self.client_left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.client_left.wait()
        return {"type": "http.disconnect"}

    async def finish(self) -> None:
        self.run.start(self.receive)
        try:
            while (event := await self.run.next_event()) is not None:
                self.events.append(event)
                if len({event.index for event in self.events}) == self._num_choices:
                    self.all_began.set()
        finally:
            await self.run.close()

    @property
    def outcomes(self) -> dict[str, float]:
        return {
            sample.labels["outcome"]: sample.value
            for family in self.state.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "gemserve_requests_total" and sample.value
        }

    def check_nothing_is_left(self) -> None:
        assert (self.state.admission.num_requests, self.state.admission.num_tokens) == (0, 0)


def test_texts_come_in_order_and_tokens_are_counted() -> None:
    run = Run(FakeEngine([output(A, cached=1), output(B), output(finish="length")]), plan())
    asyncio.run(run.finish())
    assert "".join(event.text for event in run.events) == "ab"
    assert [event.is_first for event in run.events] == [True, False, False]
    usage = run.run.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.is_over) == (
        2,
        2,
        1,
        True,
    )
    assert run.outcomes == {"length": 1}
    run.check_nothing_is_left()


def test_a_stop_token_counts_and_is_not_shown() -> None:
    run = Run(FakeEngine([output(A, 1, finish="stop", stop=1)]), plan())
    asyncio.run(run.finish())
    assert [(event.text, event.finish_reason) for event in run.events] == [("a", "stop")]
    assert run.run.usage.completion_tokens == 2


def test_a_stop_string_ends_the_choice_and_aborts_its_request() -> None:
    engine = FakeEngine([output(A), output(B), output(A)], hangs=True)
    run = Run(engine, plan(stop=("b",)))
    asyncio.run(run.finish())
    assert [event.text for event in run.events] == ["a", ""]
    assert (run.events[-1].finish_reason, run.events[-1].stop_text) == ("stop", "b")
    assert engine.num_aborted == 1
    run.check_nothing_is_left()


@pytest.mark.parametrize(("temperature", "num_requests"), [(0.0, 2), (1.0, 6)])
def test_equal_choices_are_computed_once(temperature: float, num_requests: int) -> None:
    engine = FakeEngine([output(A, finish="length")])
    run = Run(engine, plan(num_prompts=2, n=3, temperature=temperature))
    asyncio.run(run.finish())
    assert len(engine.requests) == num_requests
    assert sorted(event.index for event in run.events) == [0, 1, 2, 3, 4, 5]
    assert run.run.usage.completion_tokens == 6
    run.check_nothing_is_left()


def test_choices_draw_from_streams_of_their_own() -> None:
    engine = FakeEngine([output(A, finish="length")])
    asyncio.run(Run(engine, plan(n=3)).finish())
    assert sorted(request.sampling.choice for request in engine.requests) == [0, 1, 2]
    assert len({request.request_id for request in engine.requests}) == 3


@pytest.mark.parametrize(
    ("fault", "status", "code", "outcome"),
    [
        (RequestFailedError("its numbers were not finite"), 500, "internal_error", "error"),
        (ValueError("a bug"), 500, "internal_error", "error"),
        (EngineDrainingError("drains"), 503, "shutting_down", "shutdown"),
        (RequestExpiredError("too late"), 408, "request_timeout", "timeout"),
    ],
)
def test_a_failed_choice_ends_the_run_with_its_error(
    fault: Exception, status: int, code: str, outcome: str
) -> None:
    run = Run(FakeEngine([output(A), fault]), plan(n=2))
    with pytest.raises(ApiError) as failed:
        asyncio.run(run.finish())
    assert (failed.value.status, failed.value.code) == (status, code)
    assert run.outcomes == {outcome: 1}
    run.check_nothing_is_left()


def test_a_client_that_leaves_aborts_what_runs() -> None:
    engine = FakeEngine([output(A)], hangs=True)

    async def leave() -> Run:
        run = Run(engine, plan(n=3))
        task = asyncio.create_task(run.finish())
        await run.all_began.wait()
        run.client_left.set()
        with pytest.raises(ClientDisconnectedError):
            await task
        return run

    run = asyncio.run(leave())
    assert engine.num_aborted == 3
    assert run.outcomes == {"client_disconnect": 1}
    run.check_nothing_is_left()


def test_nothing_comes_after_the_deadline() -> None:
    run = Run(FakeEngine([output(A, finish="length")]), plan(), deadline=0.0)
    with pytest.raises(ApiError) as failed:
        asyncio.run(run.finish())
    assert failed.value.code == "request_timeout"
    assert (run.events, run.outcomes) == ([], {"timeout": 1})


def test_an_engine_that_stops_without_a_reason_is_a_fault() -> None:
    run = Run(FakeEngine([output(A)]), plan())
    with pytest.raises(ApiError) as failed:
        asyncio.run(run.finish())
    assert failed.value.code == "internal_error"
