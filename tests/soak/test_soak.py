"""The soak in its short form: everything it checks, for less than a minute. ``make soak`` runs it for ten."""

import asyncio
from pathlib import Path

import pytest

from tests.soak.server_process import server_process
from tests.soak.soak import Soak


@pytest.mark.slow
def test_random_load_leaves_no_trace_and_the_books_balance(tmp_path: Path) -> None:
    with server_process(tmp_path, "--debug-invariants") as server:
        summary = asyncio.run(Soak(server, seed=1).run(warm_up_seconds=10, seconds=30))
    print(summary.line())
    assert summary.num_left > 10
    assert summary.num_refused > 5
    assert summary.num_repeats > 10
    assert summary.demand > 3
