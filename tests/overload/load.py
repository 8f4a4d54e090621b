"""Clients in a closed loop, as polite as OpenAI's: one that is refused comes back when it was told to. Some
leave early."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

from tests.http.cache.tiny_server import COMPLETIONS, ids
from tests.soak.client import Leave, Reply, send

DEADLINE = 10.0
SHARE_THAT_LEAVES = 0.05
NEVER = 10**9  # events


@dataclass(frozen=True, slots=True)
class Answer:
    """One that was complete and in time; times in seconds of the event loop."""

    at: float
    seconds: float
    num_tokens: int


@dataclass(slots=True)
class Tally:
    answers: list[Answer] = field(default_factory=list)
    num_refused: int = 0
    num_left: int = 0
    num_timed_out: int = 0
    waits: list[int] = field(default_factory=list)  # what refused clients were told

    @property
    def num_sent(self) -> int:
        return len(self.answers) + self.num_refused + self.num_left + self.num_timed_out

    def goodput(self, since: float, until: float) -> float:
        """Tokens per second of the answers that were complete in that time."""
        return sum(answer.num_tokens for answer in self.answers if since <= answer.at < until) / (
            until - since
        )

    def percentile(self, share: float) -> float:
        """Of the time that accepted requests took."""
        times = sorted(answer.seconds for answer in self.answers)
        return times[min(len(times) - 1, int(share * len(times)))]


async def clients(port: int, count: int, tally: Tally, until: float, name: str) -> None:
    """Returns when all are through with what they began before ``until``."""
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(_client(port, f"{name}-{number}", tally, until))


async def _client(port: int, name: str, tally: Tally, until: float) -> None:
    choose, clock = random.Random(name), asyncio.get_running_loop().time
    number = 0
    while (began := clock()) < until:
        body = _body(choose)
        leave = None
        if choose.random() < SHARE_THAT_LEAVES:
            leave = Leave(after_events=NEVER, after_seconds=choose.uniform(0.05, 0.5), reset=False)
        reply = await send(port, COMPLETIONS, json.dumps(body).encode(), f"{name}-{number}", leave)
        number += 1
        wait = _enter(tally, reply, body, began, clock())
        if wait:
            await asyncio.sleep(min(wait, max(0.0, until - clock())))


def _body(choose: random.Random) -> dict[str, Any]:
    return {
        "prompt": ids(choose.randint(8, 60), choose.randrange(10**9)),
        "max_tokens": choose.randint(16, 64),
        "ignore_eos": True,
        "temperature": 0,
        "timeout": DEADLINE,
        "stream": choose.random() < 0.3,
    }


def _enter(tally: Tally, reply: Reply, body: dict[str, Any], began: float, now: float) -> float:
    """Count a reply. For how long its client stays away."""
    if reply.left:
        tally.num_left += 1
    elif reply.status == 429:
        tally.num_refused += 1
        tally.waits.append(int(reply.headers["retry-after"]))
        return tally.waits[-1]
    elif reply.status == 408 or b'"request_timeout"' in reply.body:
        tally.num_timed_out += 1
    else:
        assert reply.status == 200, reply
        assert b'"error"' not in reply.body, reply
        tally.answers.append(Answer(now, now - began, body["max_tokens"]))
    return 0.0
