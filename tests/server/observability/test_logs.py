"""The log's two forms, its colours, and the line of statistics."""

import asyncio
import io
import json
import logging
import warnings
from typing import Any, cast

import pytest

from server.engine.async_engine import AsyncEngine
from server.engine.stats import EngineStats
from server.observability.logs import configure_logging, make_formatter, with_fields
from server.observability.metrics import Metrics
from server.observability.stats_log import log_stats
from server.settings.settings import Settings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(
    level: int = logging.INFO, text: str = "took %d s", *values: object, **extra: Any
) -> logging.LogRecord:
    return logging.getLogger("gemserve.x").makeRecord(
        "gemserve.x", level, __file__, 1, text, values or (3,), extra.pop("exc_info", None), extra=extra
    )


def test_text_has_no_colours_unless_on_a_terminal_that_wants_them() -> None:
    def is_coloured(stream: io.StringIO, **environ: str) -> bool:
        return "\033[" in make_formatter("text", stream, environ).format(record(logging.WARNING))

    assert not is_coloured(io.StringIO(), TERM="xterm")
    assert is_coloured(Terminal(), TERM="xterm")
    assert not is_coloured(Terminal(), TERM="xterm", NO_COLOR="1")
    assert not is_coloured(Terminal(), TERM="dumb")
    ordinary = make_formatter("text", Terminal(), {"TERM": "xterm"}).format(record())
    assert ordinary.endswith(" INFO gemserve.x: took 3 s")


def test_json_is_one_object_per_line_with_fields_of_their_own() -> None:
    formatter = make_formatter("json", Terminal(), {})
    extra: dict[str, Any] = with_fields(outcome="stop", prompt_tokens=5, trace_id=None)
    line = formatter.format(record(**extra))
    entry = json.loads(line)
    timestamp = entry.pop("timestamp")
    assert timestamp.endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "gemserve.x",
        "message": "took 3 s",
        "outcome": "stop",
        "prompt_tokens": 5,
    }
    try:
        raise ValueError("two\nlines é")
    except ValueError as error:
        line = formatter.format(record(logging.ERROR, exc_info=(ValueError, error, error.__traceback__)))
    assert "\n" not in line
    assert json.loads(line)["exception"].endswith("ValueError: two\nlines é")


def test_a_json_log_takes_warnings_of_python_in() -> None:
    root, stream = logging.getLogger(), io.StringIO()
    before = root.handlers[:], root.level
    try:
        configure_logging("info", "json", stream)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("old\nthing", stacklevel=1)
        logging.getLogger("gemserve.x").debug("not shown")
    finally:
        logging.captureWarnings(False)
        root.handlers[:], root.level = before
    (line,) = stream.getvalue().splitlines()
    assert "old\nthing" in json.loads(line)["message"]


class Engine:
    """What the line of statistics reads of an engine."""

    def __init__(self) -> None:
        self.stats = EngineStats()

    def arrivals_in_inbox(self) -> list[float]:
        return [0.0]


class Owner:
    def __init__(self) -> None:
        self.fake: Engine | None = None

    @property
    def engine(self) -> AsyncEngine | None:
        return cast(AsyncEngine, self.fake)


def test_statistics_are_logged_while_there_is_work_and_not_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gemserve.stats")
    owner, metrics = Owner(), Metrics(Settings())

    async def turns(count: int) -> int:
        """Lines that so many intervals wrote."""
        before = len(caplog.records)
        ticks = 0

        async def sleep(seconds: float) -> None:
            nonlocal ticks
            ticks += 1
            if ticks > count:
                raise asyncio.CancelledError
            await asyncio.sleep(0)

        with pytest.MonkeyPatch.context() as patch:
            # its own name: servers of other tests run in this process
            patch.setattr("server.observability.stats_log.sleep", sleep)
            with pytest.raises(asyncio.CancelledError):
                await log_stats(owner, metrics, 10)
        return len(caplog.records) - before

    assert asyncio.run(turns(3)) == 0  # still loading
    engine = owner.fake = Engine()
    engine.arrivals_in_inbox = list  # type: ignore[method-assign]
    assert asyncio.run(turns(3)) == 0  # idle
    engine.stats.num_running = 2
    engine.stats.pools["global"].used = 1
    engine.stats.pools["global"].free = 3
    assert asyncio.run(turns(2)) == 2
    line = caplog.records[-1].getMessage()
    assert line.startswith("running=2 waiting=0 prefill=0.0 tokens/s generation=0.0 tokens/s kv_cache=25.0%")
    assert caplog.records[-1].gemserve_fields["kv_cache_usage_ratio"] == 0.25  # type: ignore[attr-defined]
    engine.stats.num_running = 0
    engine.stats.steps_total["decode"] += 5
    assert asyncio.run(turns(2)) == 1  # the interval in which the work ended, and none after it
