"""Sends what a run yields: collected into one JSON answer, or as server-sent events. Either way the run is closed at the end."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.best_of import ChoiceRanking
from server.api.generation import ChoiceEvent, GenerationRun
from server.api.wire_forms import Choice, WireForm
from server.errors import ApiError, ClientDisconnectedError
from server.metrics import Metrics

# An idle stream says so, so that no proxy takes it for dead.
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def encode_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode_json(content)


def error_response(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body(), error.status, dict(error.headers or {}))


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every chunk of a stream, or the one answer, repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def envelope(self, object_name: str, choices: list[Choice]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """``include``: one more chunk with the usage, and null on all others; ``continuous``: the usage so far on every one."""

    include: bool = False
    continuous: bool = False


async def collected_response(run: GenerationRun, form: WireForm, head: ResponseHead, headers: Mapping[str, str]) -> Response:
    pieces: dict[int, list[Choice]] = {}
    ranking = ChoiceRanking(run.plan)
    while (event := await run.next_event()) is not None:
        ranking.observe(event)
        pieces.setdefault(event.index, []).extend(form.pieces(event))
    choices = [{**form.merged(pieces[chosen]), "index": index} for index, chosen in enumerate(ranking.returned())]
    body = head.envelope(form.object_name, choices) | form.answer_fields()
    body["usage"] = run.usage.wire()
    if run.plan.shows_timings:
        body["timings"] = run.timings()
    return JsonResponse(body, headers=dict(headers))


class EventStream(ABC, Response):
    """Sends the events of a run that has begun. ``first`` is its first event, None when there was none yet. Subclasses say how
    each is written."""

    def __init__(self, run: GenerationRun, first: ChoiceEvent | None, metrics: Metrics, headers: Mapping[str, str]) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self.run = run
        self._first = first
        self._metrics = metrics

    @abstractmethod
    def event_bytes(self, event: ChoiceEvent) -> bytes:
        """May be empty."""

    @abstractmethod
    def end_bytes(self) -> bytes:
        """After the last event of a run that succeeded."""

    @abstractmethod
    def error_bytes(self, error: ApiError) -> bytes:
        """Ends the stream of a run that failed."""

    def idle_bytes(self) -> bytes:
        return KEEP_ALIVE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.streams_active.inc()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientDisconnectedError, OSError):
            return  # nobody reads on
        finally:
            self._metrics.streams_active.dec()
            await self.run.close()

    async def _send_events(self, send: Send) -> None:
        event = self._first
        is_idle = event is None
        try:
            while event is not None or is_idle:
                body = self.idle_bytes() if event is None else self.event_bytes(event)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                try:
                    event = await self.run.next_event(KEEP_ALIVE_SECONDS)
                    is_idle = False
                except TimeoutError:
                    event, is_idle = None, True
            end = self.end_bytes()
        except ApiError as error:
            end = self.error_bytes(error)
        await send({"type": "http.response.body", "body": end, "more_body": True})


class EventStreamResponse(EventStream):
    """A stream of chunks in OpenAI's form."""

    def __init__(
        self,
        run: GenerationRun,
        form: WireForm,
        head: ResponseHead,
        usage: StreamUsage,
        first: ChoiceEvent | None,
        metrics: Metrics,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(run, first, metrics, headers)
        self._form = form
        self._head = head
        self._usage = usage

    def event_bytes(self, event: ChoiceEvent) -> bytes:
        pieces = self._form.pieces(event)
        return b"".join(self._chunk([piece], is_last=self.run.is_over and piece is pieces[-1]) for piece in pieces)

    def end_bytes(self) -> bytes:
        return (self._chunk([]) if self._usage.include else b"") + DONE

    def error_bytes(self, error: ApiError) -> bytes:
        return b"data: " + encode_json(error.body()) + b"\n\n" + DONE

    def _chunk(self, choices: list[Choice], is_last: bool = False) -> bytes:
        """``is_last``: after it, no choice has more to say."""
        chunk = self._head.envelope(self._form.chunk_object_name, choices)
        for piece in choices:
            chunk |= self._form.chunk_fields(piece)
        if self._usage.include:
            chunk["usage"] = self.run.usage.wire() if self._usage.continuous or not choices else None
        if is_last and self.run.plan.shows_timings:
            chunk["timings"] = self.run.timings()
        return b"data: " + encode_json(chunk) + b"\n\n"
