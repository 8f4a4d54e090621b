"""The field ``priority`` on every endpoint that computes: the order in which waiting requests start, if the
server has one."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server

HELLO = [{"role": "user", "content": "Hello"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
    ("/v1/embeddings", {"input": "a"}),
]


@pytest.mark.parametrize(("path", "body"), BODIES, ids=[path for path, _ in BODIES])
def test_a_server_without_priorities_says_so(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    refused = server.post(path, {**body, "priority": 1})
    assert refused.status_code == 400
    assert "--scheduling-policy priority" in refused.json()["error"]["message"]
    for off in (0, None):
        assert server.post(path, {**body, "priority": off}).status_code == 200
    assert server.post(path, {**body, "priority": 1.5}).status_code == 400
    assert server.post(path, {**body, "priority": 2**63}).status_code == 400


@pytest.fixture(scope="module")
def one_at_a_time() -> Iterator[LiveServer]:
    factory = fake_engine_factory(FakeRunner(step_delay=0.02), max_num_seqs=1)
    with live_server(factory, scheduling_policy="priority") as live:
        live.client.timeout = 60
        yield live


def test_the_most_urgent_of_the_waiting_starts_first(
    one_at_a_time: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = one_at_a_time
    caplog.set_level("INFO", logger="gemserve.request")

    def ask(priority: int) -> None:
        path, body = BODIES[priority % len(BODIES)]
        headers = {"x-request-id": f"priority:{priority}"}
        assert server.post(path, {**body, "priority": priority}, headers=headers).status_code == 200

    with server.open_request(
        {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "stream": True}
    ) as connection:
        assert connection.recv(1) == b"H"
        threads = []
        for number, priority in enumerate((3, -1, 2, -4, 0), start=1):
            threads.append(threading.Thread(target=ask, args=(priority,)))
            threads[-1].start()
            server.wait_for(lambda number=number: server.metric("requests_waiting") == number, 60)  # type: ignore[misc]
    # The client has left: its place goes to the most urgent, one after the other.
    for thread in threads:
        thread.join(60)
    # As the server saw them end: the threads that are told may be woken in another order.
    ends = re.findall(r"request_id=priority:(\S+) ", caplog.text)
    assert ends == ["-4", "-1", "0", "2", "3"]
