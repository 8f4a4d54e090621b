"""What the server does when nobody asks for anything: it prepares structured output, so that no stream waits
for it later."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from server.app import _warm_up_grammars
from server.engine.stats import EngineStats
from server.grammar import compiler
from server.grammar.compiler import GrammarCompiler
from tests.fakes import fake_tokenizer
from tests.http.live_server import live_server


def test_an_idle_server_makes_the_view_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "IDLE_SECONDS", 0.1)
    with live_server() as server:
        grammars: GrammarCompiler = server.app.state.server.loaded.grammars
        server.wait_for(lambda: grammars.is_warm, seconds=60)
        server.check_alive()


def test_a_view_that_cannot_be_made_leaves_the_server_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(tokenizer: object) -> object:
        raise MemoryError

    monkeypatch.setattr(compiler, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(compiler, "_Vocabulary", fails)
    assert not GrammarCompiler(fake_tokenizer()).is_warm
    with live_server() as server:
        server.wait_for(lambda: "could not be prepared: MemoryError" in caplog.text, seconds=60)
        server.check_alive()


def test_requests_that_end_between_two_looks_keep_a_server_from_being_idle() -> None:
    stats = EngineStats()
    seen: list[bool] = []

    async def warm_up_when_idle(is_idle: Callable[[], bool]) -> None:
        seen.append(is_idle())
        stats.steps_total["prefill"] += 1
        seen.extend([is_idle(), is_idle()])
        stats.num_running = 1
        seen.append(is_idle())

    loaded = SimpleNamespace(
        engine=SimpleNamespace(stats=stats), grammars=SimpleNamespace(warm_up_when_idle=warm_up_when_idle)
    )
    state: Any = SimpleNamespace(loaded=loaded, loaded_once=asyncio.Event())
    state.loaded_once.set()
    asyncio.run(_warm_up_grammars(state))
    assert seen == [True, False, True, False]
