"""POST /v1/completions and POST /v1/chat/completions: read, check, plan, run, answer. Only the answer's form differs."""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import anyio
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.admission import BodyTicket, Ticket
from server.api.context import request_id_of, state_of
from server.api.deadline import Deadline, header_timeout
from server.api.generation import ChoiceEvent, GenerationPlan, GenerationRun
from server.api.preparation import prepare_chat, prepare_completion
from server.api.request_schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from server.api.response_schemas import ChatCompletionResponse, CompletionResponse, ErrorResponse
from server.api.responses import (
    KEEP_ALIVE_SECONDS,
    EventStreamResponse,
    ResponseHead,
    StreamUsage,
    collected_response,
)
from server.api.trace_attributes import trace_attributes
from server.api.validation import parse_request, read_json_object, request_body
from server.api.wire_forms import ChatForm, CompletionForm, WireForm
from server.engine.loaded import LoadedEngine
from server.errors import ApiError, ClientDisconnectedError, request_timeout
from server.request_metrics import RequestRecord
from server.state import ServerState
from server.tracing import PROPAGATION_HEADERS

Body = TypeVar("Body", bound=GenerationRequest)
Prepare = Callable[[ServerState, LoadedEngine, Body, str, Ticket], Awaitable[GenerationPlan]]
MakeForm = Callable[[LoadedEngine, GenerationPlan, Body], WireForm]

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503)
}


class _Endpoint(Generic[Body]):
    """What tells one generation endpoint from the other."""

    def __init__(self, name: str, id_prefix: str, body: type[Body], prepare: Prepare[Body], make_form: MakeForm[Body]) -> None:
        self._name = name
        self._id_prefix = id_prefix
        self._body = body
        self._prepare = prepare
        self._make_form = make_form

    async def handle(self, request: Request) -> Response:
        state = state_of(request)
        response_id = f"{self._id_prefix}-{uuid.uuid4().hex}"
        request_id = request_id_of(request)
        request_id.adopt(response_id)
        carrier = {name: request.headers[name] for name in PROPAGATION_HEADERS if name in request.headers}
        record = RequestRecord(state.metrics, self._name, response_id, request_id.value, state.tracer, carrier)
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
                record.observe_plan(plan.num_prompt_tokens, max(prompt.sampling.max_tokens for prompt in plan.prompts))
                model = body.model or loaded.model_names[0]
                if record.is_traced:
                    record.add_attributes(trace_attributes(request, plan, body, model))
                head = ResponseHead(response_id, int(time.time()), model, state.system_fingerprint)
                headers = parsed.headers()
                form = self._make_form(loaded, plan, body)
                until = deadline.queue_deadline(
                    stream=record.stream, num_sequences=plan.num_sequences, keep_alive_seconds=KEEP_ALIVE_SECONDS
                )
                run = GenerationRun(
                    loaded.engine, loaded.tokenizer, plan, record, ticket, deadline=deadline.at, queue_deadline=until
                )
            except BaseException:
                ticket.close()
                raise
            run.start(request.receive)
            if body.stream:
                return await _stream(run, form, head, body, state, headers)
            try:
                response = await collected_response(run, form, head, headers)
            finally:
                await run.close()
            response.headers.update(record.timing_headers())
            return response

    async def _plan(
        self, state: ServerState, loaded: LoadedEngine, body: Body, response_id: str, ticket: Ticket, deadline: Deadline
    ) -> GenerationPlan:
        """Checks and encodes. What waits for its turn to be encoded is given up at the deadline."""
        try:
            with anyio.fail_after(deadline.remaining):
                return await self._prepare(state, loaded, body, response_id, ticket)
        except TimeoutError:
            raise request_timeout() from None


async def _stream(
    run: GenerationRun, form: WireForm, head: ResponseHead, body: GenerationRequest, state: ServerState, headers: dict[str, str]
) -> Response:
    """Waits for the first token, so that what fails before it is an HTTP error; after a while the stream begins without one."""
    first: ChoiceEvent | None
    try:
        first = await run.next_event(KEEP_ALIVE_SECONDS)
    except TimeoutError:
        first = None
    except BaseException:
        await run.close()
        raise
    options = body.stream_options
    usage = StreamUsage()
    if options is not None and options.include_usage:
        usage = StreamUsage(include=True, continuous=bool(options.continuous_usage_stats))
    return EventStreamResponse(run, form, head, usage, first, state.metrics, headers)


@asynccontextmanager
async def _counted(record: RequestRecord, state: ServerState) -> AsyncIterator[BodyTicket]:
    """Every request is counted once: by its outcome, or as rejected by its reason; and its body while it is read and used."""
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


def _completion_form(loaded: LoadedEngine, plan: GenerationPlan, body: CompletionRequest) -> WireForm:
    return CompletionForm(loaded.tokenizer, plan, body)


def _chat_form(loaded: LoadedEngine, plan: GenerationPlan, body: ChatCompletionRequest) -> WireForm:
    return ChatForm(loaded.tokenizer, plan, body)


def create_router() -> APIRouter:
    router = APIRouter()
    completions = _Endpoint("completions", "cmpl", CompletionRequest, prepare_completion, _completion_form)
    chat = _Endpoint("chat_completions", "chatcmpl", ChatCompletionRequest, prepare_chat, _chat_form)

    @router.post(
        "/v1/completions",
        responses={200: {"model": CompletionResponse}, **_ERRORS},
        openapi_extra=request_body("CompletionRequest"),
        summary="Continue a prompt",
    )
    async def create_completion(request: Request) -> Response:
        return await completions.handle(request)

    @router.post(
        "/v1/chat/completions",
        responses={200: {"model": ChatCompletionResponse}, **_ERRORS},
        openapi_extra=request_body("ChatCompletionRequest"),
        summary="Answer a chat",
    )
    async def create_chat_completion(request: Request) -> Response:
        return await chat.handle(request)

    return router
