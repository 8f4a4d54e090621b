"""Sends what a run yields as server-sent events, and closes the run at the end."""

from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.generation.answer import StreamedAnswer
from server.api.generation.run import ChoiceEvent, GenerationRun
from server.errors import ApiError, ClientDisconnectedError
from server.observability.metrics import Metrics

# An idle stream says so, so that no proxy takes it for dead.
KEEP_ALIVE_SECONDS = 15.0
KEEP_ALIVE = b": keep-alive\n\n"

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class EventStreamResponse(Response):
    """Sends the events of a run that has begun. ``first`` is its first event, None when there was none
    yet."""

    def __init__(
        self,
        run: GenerationRun,
        answer: StreamedAnswer,
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
