"""The processes of a group: told, answered, watched, and gone with rank 0, whatever ends it. None of them has
a model here."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from model.interface.errors import ConfigError
from model.parallel.ranks import RankError, Ranks

LIGHT = "tests.model.parallel.light_worker"
ROOT = Path(__file__).parents[3]
DEADLINE = 60
PARENT = f"""
import sys
from model.parallel.ranks import Ranks
ranks = Ranks(2, {LIGHT!r})
ranks.send("answer")
ranks.answers()
ranks.send("be busy")
print(*ranks.process_ids, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with contextlib.closing(Ranks(3, LIGHT)) as ranks:
        yield ranks


def is_gone(process_id: int) -> bool:
    """Also one that nobody has waited for yet."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(process_ids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not all(map(is_gone, process_ids)):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.02)


def test_answers_come_in_order_faults_are_raised_and_signals_for_the_service_are_left_to_rank_0(
    ranks: Ranks,
) -> None:
    ranks.send("answer")
    assert [answer.free_memory for answer in ranks.answers()] == [103, 203]
    ranks.send("refuse")
    with pytest.raises(ConfigError, match="rank 1: --flag is wrong"):
        ranks.answers()
    ranks.send("answer")
    assert len(ranks.answers()) == 2
    ranks.send("be interrupted")
    assert len(ranks.answers()) == 2


def test_a_rank_that_is_killed_is_told_to_whoever_watches_and_to_whoever_asks(ranks: Ranks) -> None:
    told: queue.Queue[RankError] = queue.Queue()
    ranks.on_death(told.put)
    ranks.send("answer")
    ranks.answers()
    os.kill(ranks.process_ids[1], signal.SIGKILL)
    death = told.get(timeout=DEADLINE)
    assert f"rank 2 of 3 (process {ranks.process_ids[1]}) was ended by SIGKILL" in str(death)
    ranks.on_death(told.put)
    assert told.get(timeout=DEADLINE) is death, "who asks late is told at once"
    with pytest.raises(RankError, match="SIGKILL"):
        ranks.guarded(ranks.answers)
    with pytest.raises(RankError, match="SIGKILL"):
        ranks.answers()
    assert ranks.explain(RuntimeError("Connection closed by peer")) is death


def test_a_rank_that_fails_says_why(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    ranks.send("fail")
    with pytest.raises(RankError, match="ended with exit code 1: ValueError: the tensor is bent"):
        ranks.answers()
    assert "failed\nValueError: the tensor is bent" in caplog.text


def test_closing_ends_all_ranks_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(3, LIGHT)
    told: list[RankError] = []
    ranks.on_death(told.append)
    ranks.send("be busy")
    ranks.close()
    assert all(map(is_gone, ranks.process_ids))
    assert told == []
    assert caplog.text == ""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, None], ids=["SIGKILL", "SIGTERM", "exit"])
def test_no_rank_outlives_rank_0(ending: signal.Signals | None) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        process_ids = [int(word) for word in parent.stdout.readline().split()]
        assert len(process_ids) == 1
        assert not any(map(is_gone, process_ids))
        if ending is None:
            parent.stdin.close()
        else:
            parent.send_signal(ending)
        parent.wait(DEADLINE)
        wait_until_gone(process_ids)
