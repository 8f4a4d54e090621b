"""Ten times more clients than places for a few seconds: what is refused is told when to come back, what is taken is finished in
time, nothing fails, and the books balance."""

import asyncio
import random
import re
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server

RUNNING, QUEUED = 4, 4
NUM_CLIENTS = 10 * (RUNNING + QUEUED)
SECONDS = 5.0
DEADLINE = 10.0
MAX_MEMORY_GROWTH = 64 << 20  # the clients' own garbage is in the same process


@dataclass
class Tally:
    replies: Counter[str] = field(default_factory=Counter)  # finished, refused, left
    waits: set[int] = field(default_factory=set)
    statuses: Counter[int] = field(default_factory=Counter)


async def client(http: httpx.AsyncClient, number: int, tally: Tally, until: float) -> None:
    choose = random.Random(number)
    while asyncio.get_running_loop().time() < until:
        body = {"prompt": "a" * choose.randint(1, 20), "max_tokens": choose.randint(1, 8), "stream": choose.random() < 0.5}
        leaves_early = choose.random() < 0.1
        request = http.build_request(
            "POST",
            "/v1/completions",
            json=body,
            headers={"x-request-timeout": str(DEADLINE)},
            timeout=httpx.Timeout(20, read=0.02 if leaves_early else 20),
        )
        try:
            response = await http.send(request)
        except httpx.ReadTimeout:
            tally.replies["left"] += 1
            continue
        tally.statuses[response.status_code] += 1
        if response.status_code == 429:
            tally.replies["refused"] += 1
            tally.waits.add(int(response.headers["retry-after"]))
            await asyncio.sleep(choose.uniform(0.2, 0.6))  # less patient than asked for
        else:
            assert '"error"' not in response.text
            tally.replies["finished"] += 1


def served(server: LiveServer) -> Counter[str]:
    """Requests on the two routes by how the metrics say they ended, and all of them as HTTP counted them."""
    counts: Counter[str] = Counter()
    for line in server.client.get("/metrics").text.splitlines():
        match = re.fullmatch(r"gemserve_(requests_total|request_rejections_total|http_requests_total)\{(.*)\} (\S+)", line)
        if match is None:
            continue
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
        if match[1] == "http_requests_total":
            if labels["method"] == "POST":
                counts["received"] += int(float(match[3]))
                counts[f"status {labels['status'][0]}xx"] += int(float(match[3]))
        else:
            counts[labels.get("outcome") or labels["reason"]] += int(float(match[3]))
    return counts


@pytest.mark.slow
def test_a_crowd_is_served_in_part_and_refused_in_order() -> None:
    async def crowd(url: str) -> Tally:
        tally = Tally()
        # Idle connections are given up before the server closes them, which a request could meet half-way.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1)
        async with httpx.AsyncClient(base_url=url, limits=limits) as http:
            until = asyncio.get_running_loop().time() + SECONDS
            async with asyncio.TaskGroup() as group:
                for number in range(NUM_CLIENTS):
                    group.create_task(client(http, number, tally, until))
        return tally

    factory = fake_engine_factory(FakeRunner(step_delay=0.01), max_num_seqs=RUNNING)
    with live_server(factory, max_queued_requests=QUEUED) as server:
        asyncio.run(asyncio.wait_for(crowd(server.url), 6 * SECONDS))
        server.wait_for(server.is_idle)
        before, memory = served(server), psutil.Process().memory_info().rss
        tally = asyncio.run(asyncio.wait_for(crowd(server.url), 6 * SECONDS))
        server.wait_for(server.is_idle)
        server.wait_for(lambda: server.metric("http_requests_in_flight", route="/v1/completions") == 0)
        counts = served(server) - before
        assert psutil.Process().memory_info().rss - memory < MAX_MEMORY_GROWTH
        admission = server.app.state.server.admission
        assert (admission.num_requests, admission.num_tokens) == (0, 0)
        server.check_alive()
    assert set(tally.statuses) == {200, 429}
    assert counts["status 5xx"] == 0
    assert all(1 <= wait <= 60 for wait in tally.waits)
    assert min(tally.replies[reply] for reply in ("finished", "refused", "left")) > 0, tally.replies
    assert tally.replies["refused"] > 20, tally.replies
    # Of those that left, some were finished or refused without knowing it.
    finished = counts["stop"] + counts["length"]
    assert counts["received"] == sum(tally.replies.values())
    assert counts["received"] == finished + counts["queue_full"] + counts["client_disconnect"]
    assert finished >= tally.replies["finished"]
    assert counts["queue_full"] >= tally.replies["refused"]
