"""What every endpoint that generates does with a request: read, check, plan, run, answer. Only plan and
answer differ."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response

from server.admission import BodyTicket, Ticket
from server.api.generation.event_stream import (
    KEEP_ALIVE_SECONDS,
    Answer,
    EventStreamResponse,
    collected_response,
)
from server.api.generation.plan import GenerationPlan
from server.api.generation.request import GenerationBody
from server.api.generation.run import ChoiceEvent, GenerationRun
from server.api.generation.trace_attributes import trace_attributes
from server.api.generation.validation import parse_request, read_json_object
from server.api.generation.wire_values import ResponseHead
from server.errors import ApiError, ClientDisconnectedError, request_timeout
from server.http.context import request_id_of, state_of
from server.http.deadline import Deadline, header_timeout
from server.loading.load import LoadedEngine
from server.observability.request_metrics import RequestRecord
from server.observability.tracing import PROPAGATION_HEADERS
from server.state import ServerState

Body = TypeVar("Body", bound=GenerationBody)
Prepare = Callable[[ServerState, LoadedEngine, Body, str, Ticket], Awaitable[GenerationPlan]]
MakeAnswer = Callable[[ServerState, LoadedEngine, GenerationPlan, Body, ResponseHead], Answer]


class GenerationEndpoint(ABC, Generic[Body]):
    """One request from its arrival to its answer."""

    def __init__(self, name: str, id_prefix: str, body: type[Body], prepare: Prepare[Body]) -> None:
        self._name = name
        self._id_prefix = id_prefix
        self._body = body
        self._prepare = prepare

    @abstractmethod
    async def respond(
        self,
        run: GenerationRun,
        body: Body,
        head: ResponseHead,
        state: ServerState,
        loaded: LoadedEngine,
        headers: dict[str, str],
    ) -> Response:
        """The answer in one piece, when the run is over; or a stream that has begun, which closes the run at
        its end."""

    async def handle(self, request: Request) -> Response:
        state = state_of(request)
        response_id = f"{self._id_prefix}{uuid.uuid4().hex}"
        request_id = request_id_of(request)
        request_id.adopt(response_id)
        carrier = {name: request.headers[name] for name in PROPAGATION_HEADERS if name in request.headers}
        record = RequestRecord(
            state.metrics, self._name, response_id, request_id.value, state.tracer, carrier
        )
        async with _counted(record, state) as held:
            loaded = state.require_loaded()
            arrival, timeout = time.monotonic(), header_timeout(request.headers)
            value = await read_json_object(request, held, state.settings.read_timeout or None)
            parsed = parse_request(self._body, value, strict_params=state.settings.strict_params)
            body = parsed.body
            record.stream = bool(body.stream)
            deadline = Deadline.of(request.headers, arrival, timeout, body.timeout)
            ticket = state.admission.ticket(loaded.engine.limits.max_num_seqs)
            try:
                plan = await self._plan(state, loaded, body, response_id, ticket, deadline)
                ticket.start(plan.num_sequences, plan.num_prompt_tokens)
                record.observe_plan(
                    plan.num_prompt_tokens, max(prompt.sampling.max_tokens for prompt in plan.prompts)
                )
                model = body.model or loaded.model_names[0]
                if record.is_traced:
                    record.add_attributes(trace_attributes(request, plan, getattr(body, "seed", None), model))
                head = ResponseHead(response_id, int(time.time()), model, state.system_fingerprint)
                headers = parsed.headers()
                until = deadline.queue_deadline(
                    stream=record.stream,
                    num_sequences=plan.num_sequences,
                    keep_alive_seconds=KEEP_ALIVE_SECONDS,
                )
                run = GenerationRun(
                    loaded.engine,
                    loaded.tokenizer,
                    plan,
                    record,
                    ticket,
                    deadline=deadline.at,
                    queue_deadline=until,
                )
            except BaseException:
                ticket.close()
                raise
            run.start(request.receive)
            try:
                response = await self.respond(run, body, head, state, loaded, headers)
            except BaseException as error:
                if isinstance(error, Exception):
                    run.fail()
                await run.close()
                raise
            if not body.stream:
                await run.close()
                response.headers.update(record.timing_headers())
            return response

    async def _plan(
        self,
        state: ServerState,
        loaded: LoadedEngine,
        body: Body,
        response_id: str,
        ticket: Ticket,
        deadline: Deadline,
    ) -> GenerationPlan:
        """Checks and encodes. What waits for its turn to be encoded is given up at the deadline."""
        try:
            with anyio.fail_after(deadline.remaining):
                return await self._prepare(state, loaded, body, response_id, ticket)
        except TimeoutError:
            raise request_timeout() from None


class AnsweringEndpoint(GenerationEndpoint[Body]):
    """What tells one endpoint that generates from the others."""

    def __init__(
        self,
        name: str,
        id_prefix: str,
        body: type[Body],
        prepare: Prepare[Body],
        make_answer: MakeAnswer[Body],
    ) -> None:
        super().__init__(name, id_prefix, body, prepare)
        self._make_answer = make_answer

    async def respond(
        self,
        run: GenerationRun,
        body: Body,
        head: ResponseHead,
        state: ServerState,
        loaded: LoadedEngine,
        headers: dict[str, str],
    ) -> Response:
        answer = self._make_answer(state, loaded, run.plan, body, head)
        return await (
            _stream(run, answer, state, headers) if body.stream else collected_response(run, answer, headers)
        )


async def _stream(
    run: GenerationRun, answer: Answer, state: ServerState, headers: dict[str, str]
) -> Response:
    """Waits for the first token, so that what fails before it is an HTTP error; after a while the stream
    begins without one."""
    first: ChoiceEvent | None
    try:
        first = await run.next_event(KEEP_ALIVE_SECONDS)
    except TimeoutError:
        first = None
    except BaseException:
        await run.close()
        raise
    return EventStreamResponse(run, answer, first, state.metrics, headers)


@asynccontextmanager
async def _counted(record: RequestRecord, state: ServerState) -> AsyncIterator[BodyTicket]:
    """Every request is counted once: by its outcome, or as rejected by its reason; and its body while it is
    read and used."""
    try:
        with state.admission.body() as held:
            yield held
    except ApiError as error:
        if not record.is_finished:
            if error.rejection is None:
                record.finish(error.outcome)
            else:
                record.reject(error.rejection)
        raise
    except ClientDisconnectedError:
        record.finish("client_disconnect")
        raise
    except Exception:
        record.finish("error")
        raise
