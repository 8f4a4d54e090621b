"""A server without HTTP and without weights, for unit tests of endpoints: requests made by hand, and an
engine that says what it is told to."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from starlette.requests import Request
from starlette.types import Message, Receive

from server.engine.request import EngineRequest, FinishReason, RequestTimings, TokenOutput
from server.grammar.compiler import GrammarCompiler
from server.http.context import REQUEST_ID_KEY, RequestId
from server.loading.load import LoadedEngine
from server.observability.metrics import Metrics
from server.settings.settings import Settings
from server.state import ServerState
from server.text.tokenizer import Tokenizer
from tests.server.text.small_tokenizer import build_tokenizer

Step = TokenOutput | BaseException


def output(
    *token_ids: int,
    finish: FinishReason | None = None,
    cached: int = 0,
    stop: int | None = None,
    **fields: Any,
) -> TokenOutput:
    timings = RequestTimings(arrival=1.0, first_scheduled=2.0, first_token=3.0)
    return TokenOutput(list(token_ids), cached, timings, finish_reason=finish, stop_token_id=stop, **fields)


class FakeEngine:
    """Every request is answered with the same steps; one that is an exception is raised. ``hangs``: after
    them, nothing comes."""

    is_dead = is_stalled = False
    is_ready = True

    def __init__(self, steps: Sequence[Step], max_model_len: int = 64, *, hangs: bool = False) -> None:
        self.steps = steps
        self.hangs = hangs
        self.limits = SimpleNamespace(max_model_len=max_model_len, max_num_seqs=8)
        self.requests: list[EngineRequest] = []
        self.num_aborted = 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[TokenOutput]:
        self.requests.append(request)
        try:
            for step in self.steps:
                await asyncio.sleep(0)
                if isinstance(step, BaseException):
                    raise step
                yield step
            if self.hangs:
                await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):
            self.num_aborted += 1
            raise


def server_state(
    engine: FakeEngine | None = None, tokenizer: Tokenizer | None = None, **settings: Any
) -> ServerState:
    """``engine`` None: the model is not loaded."""
    given = Settings(**settings)
    state = ServerState(given, Metrics(given))
    if engine is not None:
        tokenizer = tokenizer or build_tokenizer()
        loaded = SimpleNamespace(
            engine=engine,
            tokenizer=tokenizer,
            grammars=GrammarCompiler(tokenizer),
            model_names=["tiny", "other"],
            hidden_size=4,
            default_sampling={},
            fingerprint="f",
            model_info={"dtype": "float32"},
        )
        state.loaded = cast(LoadedEngine, loaded)
    return state


def post(state: ServerState, path: str, body: object, *, receive: Receive | None = None) -> Request:
    """A request whose client stays until it is answered."""
    content = json.dumps(body).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(b"content-type", b"application/json")],
        "app": SimpleNamespace(state=SimpleNamespace(server=state)),
        REQUEST_ID_KEY: RequestId("req-1"),
    }
    messages: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def stays() -> Message:
        if messages:
            return messages.pop()
        return await (receive or _forever)()

    return Request(scope, stays)


async def _forever() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
