"""What every endpoint that generates does with a request: read, check, plan, run, answer. An API brings the
type of its body, its plan and its answer."""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response

from server.admission import BodyTicket
from server.api.generation.answer import Answer, StreamedAnswer
from server.api.generation.event_stream import KEEP_ALIVE_SECONDS, EventStreamResponse
from server.api.generation.plan import GenerationPlan, Intake
from server.api.generation.request import GenerationBody
from server.api.generation.run import ChoiceEvent, GenerationRun
from server.api.generation.trace_attributes import trace_attributes
from server.api.generation.validation import parse_request, read_json_object
from server.api.generation.wire_values import ResponseHead
from server.errors import ApiError, ClientDisconnectedError, request_timeout
from server.http.context import request_id_of, state_of
from server.http.deadline import Deadline, header_timeout
from server.observability.request_metrics import RequestRecord
from server.observability.tracing import PROPAGATION_HEADERS
from server.state import ServerState

Body = TypeVar("Body", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[Body]):
    """One API that generates: a request from its arrival to its answer.

    ``name``: in metrics and traces. ``plan``: what a body comes to, checked, with constraints compiled,
    prompts encoded and defaults filled in; raises ApiError that names the field. ``answer``: what turns the
    events of a run of the plan into bytes; a ``StreamedAnswer`` unless the plan refuses ``stream``.
    """

    name: str
    id_prefix: str
    body_type: type[Body]
    plan: Callable[[Intake, Body], Awaitable[GenerationPlan]]
    answer: Callable[[Intake, GenerationPlan, Body, ResponseHead], Answer]

    async def handle(self, request: Request) -> Response:
        state = state_of(request)
        response_id = f"{self.id_prefix}{uuid.uuid4().hex}"
        request_id = request_id_of(request)
        request_id.adopt(response_id)
        carrier = {name: request.headers[name] for name in PROPAGATION_HEADERS if name in request.headers}
        record = RequestRecord(state.metrics, self.name, response_id, request_id.value, state.tracer, carrier)
        async with _counted(record, state) as held:
            loaded = state.require_loaded()
            arrival, timeout = time.monotonic(), header_timeout(request.headers)
            value = await read_json_object(request, held, state.settings.read_timeout or None)
            parsed = parse_request(self.body_type, value, strict_params=state.settings.strict_params)
            body = parsed.body
            record.stream = bool(body.stream)
            deadline = Deadline.of(request.headers, arrival, timeout, body.timeout)
            ticket = state.admission.ticket(loaded.engine.limits.max_num_seqs)
            try:
                intake = Intake(state, loaded, response_id, ticket)
                plan = await self._plan_in_time(intake, body, deadline)
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
                answer = self.answer(intake, plan, body, head)
                if body.stream:
                    assert isinstance(answer, StreamedAnswer)
                    return await _begun_stream(run, answer, state, headers)
                while (event := await run.next_event()) is not None:
                    answer.collect(event)
                content = await answer.written(run.usage)
            except BaseException as error:
                if isinstance(error, Exception):
                    run.fail()
                await run.close()
                raise
            await run.close()
            response = Response(content, media_type="application/json", headers=headers)
            response.headers.update(record.timing_headers())
            return response

    async def _plan_in_time(self, intake: Intake, body: Body, deadline: Deadline) -> GenerationPlan:
        """Checks and encodes. What waits for its turn to be encoded is given up at the deadline."""
        try:
            with anyio.fail_after(deadline.remaining):
                return await self.plan(intake, body)
        except TimeoutError:
            raise request_timeout() from None


async def _begun_stream(
    run: GenerationRun, answer: StreamedAnswer, state: ServerState, headers: dict[str, str]
) -> Response:
    """Waits for the first token, so that what fails before it is an HTTP error; after a while the stream
    begins without one."""
    first: ChoiceEvent | None
    try:
        first = await run.next_event(KEEP_ALIVE_SECONDS)
    except TimeoutError:
        first = None
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
