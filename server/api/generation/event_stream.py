"""Sends what a run yields: collected into one JSON answer, or as server-sent events. Either way the run is
closed at the end."""

from collections.abc import Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.generation.run import ChoiceEvent, GenerationRun, Usage
from server.errors import ApiError, ClientDisconnectedError
from server.http.json_response import JsonResponse
from server.observability.metrics import Metrics

# An idle stream says so, so that no proxy takes it for dead.
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Answer(Protocol):
    """What an endpoint says of a run: ``chunks`` of a stream until its ``end`` or ``failure``, or one
    ``collected`` body. ``usage`` is that of the run so far."""

    def chunks(self, event: ChoiceEvent, usage: Usage) -> bytes: ...

    def end(self, usage: Usage) -> bytes: ...

    def failure(self, error: ApiError, usage: Usage) -> bytes: ...

    def collect(self, event: ChoiceEvent) -> None: ...

    def collected(self, usage: Usage) -> dict[str, Any]: ...


async def collected_response(run: GenerationRun, answer: Answer, headers: Mapping[str, str]) -> Response:
    while (event := await run.next_event()) is not None:
        answer.collect(event)
    return JsonResponse(answer.collected(run.usage), headers=dict(headers))


class EventStreamResponse(Response):
    """Sends the events of a run that has begun. ``first`` is its first event, None when there was none
    yet."""

    def __init__(
        self,
        run: GenerationRun,
        answer: Answer,
        first: ChoiceEvent | None,
        metrics: Metrics,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        del self.headers["content-length"]
        self._run = run
        self._answer = answer
        self._first = first
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._metrics.streams_active.inc()
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientDisconnectedError, OSError):
            return  # nobody reads on
        except Exception:
            self._run.fail()
            raise
        finally:
            self._metrics.streams_active.dec()
            await self._run.close()

    async def _send_events(self, send: Send) -> None:
        event = self._first
        is_idle = event is None
        try:
            while event is not None or is_idle:
                body = KEEP_ALIVE if event is None else self._answer.chunks(event, self._run.usage)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                try:
                    event = await self._run.next_event(KEEP_ALIVE_SECONDS)
                    is_idle = False
                except TimeoutError:
                    event, is_idle = None, True
            end = self._answer.end(self._run.usage)
        except ApiError as error:
            end = self._answer.failure(error, self._run.usage)
        await send({"type": "http.response.body", "body": end, "more_body": True})
