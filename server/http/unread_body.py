"""An answer that is given before all of the body came, such as a refusal by size or key, reaches its client:
a connection that is closed while data is on its way is reset, and the answer lost. What still comes is thrown
away for a while, once the answer is out."""

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_SECONDS = 5.0


class UnreadBodyMiddleware:
    def __init__(self, app: ASGIApp, read_timeout: float) -> None:
        self._app = app
        self._seconds = min(LINGER_SECONDS, read_timeout or LINGER_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        is_read = False

        async def receive_noting() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or message["type"] != "http.request" or not message.get("more_body", False)
            return message

        async def send_before_the_rest(message: Message) -> None:
            if is_read or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):  # a client that goes on for longer may be reset
                async with asyncio.timeout(self._seconds):
                    while not is_read:
                        await receive_noting()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        await self._app(scope, receive_noting, send_before_the_rest)


def _has_body(scope: Scope) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )
