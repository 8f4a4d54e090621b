"""The overload in its short form: all that it checks, but for the share of the best that is left, which only
a machine without other work can tell; ``make overload`` asks for nine tenths."""

import asyncio
from pathlib import Path

import pytest

from tests.overload.overload import CACHE_TOKENS, FLAGS, run
from tests.soak.server_process import server_process


@pytest.mark.slow
def test_a_crowd_is_served_in_part_and_refused_in_order(tmp_path: Path) -> None:
    # A folder for the counters of several processes is not used: the books could not balance with what others
    # left there.
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "missing")}
    with server_process(tmp_path, *FLAGS, cache_tokens=CACHE_TOKENS, environ=environ) as server:
        assert "PROMETHEUS_MULTIPROC_DIR is ignored" in server.log_tail()
        for _ in range(4):  # other programs may take the processor: one undisturbed time shows it
            summary = asyncio.run(run(server, seconds=8))
            print(summary.line())
            if summary.keeps_deadlines and summary.share > 0.3:
                return
    pytest.fail(summary.line())
