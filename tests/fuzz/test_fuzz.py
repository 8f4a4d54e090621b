"""The fuzz in its short form; ``make fuzz`` sends twenty thousand."""

import asyncio
from pathlib import Path

import pytest

from tests.fuzz.fuzz import FLAGS, run
from tests.soak.server_process import server_process


@pytest.mark.slow
def test_hostile_requests_leave_no_trace(tmp_path: Path) -> None:
    with server_process(tmp_path, *FLAGS) as server:
        summary = asyncio.run(run(server, num_requests=500, seed=1))
    print(summary.line())
    assert len(summary.kinds) == 16
