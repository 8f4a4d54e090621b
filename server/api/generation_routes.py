"""POST /v1/completions and POST /v1/chat/completions: read, check, plan, run, answer. Only the answer's form differs, there and
on every other endpoint that generates (``GenerationEndpoint``)."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import anyio
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.admission import Ticket
from server.api.context import request_id_of, state_of
from server.api.deadline import Deadline, header_timeout
from server.api.generation import ChoiceEvent, GenerationPlan, GenerationRun
from server.api.preparation import prepare_chat, prepare_completion
from server.api.request_schemas import ChatCompletionRequest, CompletionRequest, GenerationBody, GenerationRequest
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
from server.text.tokenizer import Tokenizer
from server.tracing import PROPAGATION_HEADERS

Body = TypeVar("Body", bound=GenerationBody)
Prepare = Callable[[ServerState, LoadedEngine, Body, str, Ticket], Awaitable[GenerationPlan]]
OpenAIBody = TypeVar("OpenAIBody", bound=GenerationRequest)

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 403, 404, 408, 413, 429, 500, 503)
}


class GenerationEndpoint(ABC, Generic[Body]):
    """One request from its arrival to its answer. Subclasses say what the answer looks like."""

    def __init__(self, name: str, id_prefix: str, body: type[Body], prepare: Prepare[Body]) -> None:
        self._name = name
        self._id_prefix = id_prefix
        self._body = body
        self._prepare = prepare

    @abstractmethod
    async def collect(
        self, run: GenerationRun, head: ResponseHead, body: Body, state: ServerState, headers: Mapping[str, str]
    ) -> Response:
        """The answer in one piece, when the run is over."""

    @abstractmethod
    def stream(
        self,
        run: GenerationRun,
        head: ResponseHead,
        body: Body,
        first: ChoiceEvent | None,
        state: ServerState,
        headers: Mapping[str, str],
    ) -> Response:
        """The answer as a stream that begins with the event ``first``, or without one."""

    async def handle(self, request: Request) -> Response:
        state = state_of(request)
        response_id = f"{self._id_prefix}{uuid.uuid4().hex}"
        request_id = request_id_of(request)
        request_id.adopt(response_id)
        carrier = {name: request.headers[name] for name in PROPAGATION_HEADERS if name in request.headers}
        record = RequestRecord(state.metrics, self._name, response_id, request_id.value, state.tracer, carrier)
        async with _counted(record):
            loaded = state.require_loaded()
            arrival, timeout = time.monotonic(), header_timeout(request.headers)
            value = await read_json_object(request, state.admission, state.settings.read_timeout or None)
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
                    record.add_attributes(trace_attributes(request, plan, getattr(body, "seed", None), model))
                head = ResponseHead(response_id, int(time.time()), model, state.system_fingerprint)
                headers = parsed.headers()
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
                return self.stream(run, head, body, await _first_event(run), state, headers)
            try:
                response = await self.collect(run, head, body, state, headers)
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


async def _first_event(run: GenerationRun) -> ChoiceEvent | None:
    """Waits for the first token, so that what fails before it is an HTTP error; after a while the stream begins without one."""
    try:
        return await run.next_event(KEEP_ALIVE_SECONDS)
    except TimeoutError:
        return None
    except BaseException:
        await run.close()
        raise


@asynccontextmanager
async def _counted(record: RequestRecord) -> AsyncIterator[None]:
    """Every request is counted once: by its outcome, or as rejected by its reason."""
    try:
        yield
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


class _OpenAIEndpoint(GenerationEndpoint[OpenAIBody]):
    """Answers in the wire form of OpenAI's two endpoints."""

    def __init__(
        self,
        name: str,
        id_prefix: str,
        body: type[OpenAIBody],
        prepare: Prepare[OpenAIBody],
        make_form: Callable[[Tokenizer, GenerationPlan, OpenAIBody], WireForm],
    ) -> None:
        super().__init__(name, id_prefix, body, prepare)
        self._make_form = make_form

    async def collect(
        self, run: GenerationRun, head: ResponseHead, body: OpenAIBody, state: ServerState, headers: Mapping[str, str]
    ) -> Response:
        return await collected_response(run, self._make_form(run.tokenizer, run.plan, body), head, headers)

    def stream(
        self,
        run: GenerationRun,
        head: ResponseHead,
        body: OpenAIBody,
        first: ChoiceEvent | None,
        state: ServerState,
        headers: Mapping[str, str],
    ) -> Response:
        form = self._make_form(run.tokenizer, run.plan, body)
        options = body.stream_options
        usage = StreamUsage()
        if options is not None and options.include_usage:
            usage = StreamUsage(include=True, continuous=bool(options.continuous_usage_stats))
        return EventStreamResponse(run, form, head, usage, first, state.metrics, headers)


def create_router() -> APIRouter:
    router = APIRouter()
    completions = _OpenAIEndpoint("completions", "cmpl-", CompletionRequest, prepare_completion, CompletionForm)
    chat = _OpenAIEndpoint("chat_completions", "chatcmpl-", ChatCompletionRequest, prepare_chat, ChatForm)

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
