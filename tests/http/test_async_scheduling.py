"""The server with --async-scheduling, on a CPU, where it is off by default: answers, usage and counts are
those without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.cache.tiny_server import COMPLETIONS, Answer, ask, at_once, ids, is_empty, tiny_server
from tests.http.live_server import LiveServer
from tests.tiny import write_tiny_folder

BODIES: list[dict[str, Any]] = [
    {
        "prompt": ids(5 + 3 * index, seed=index),
        "max_tokens": 10 + 7 * index,
        "temperature": index % 3,
        "seed": index,
        "stream": index % 2 == 0,
        # Some end with a token that nobody knew of before it was drawn, some with a text, some by length.
        "stop_token_ids": list(range(20 * index, 20 * index + 20)) if index % 4 < 2 else [],
        "stop": ["e"] if index % 4 == 2 else None,
    }
    for index in range(10)
]


class Ahead:
    """Counts the steps that were launched before the results of the one before them were read."""

    def __init__(self, server: LiveServer) -> None:
        core = server.app.state.server.loaded.engine._core
        launch = core._launch_ahead
        self.count = 0

        def counted(launched: object) -> object:
            ahead = launch(launched)
            self.count += ahead is not None
            return ahead

        core._launch_ahead = counted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[list[Answer], float]:
    with tiny_server(folder) as server:
        ahead = Ahead(server)
        answers = at_once(lambda body: ask(server, body), BODIES)
        assert ahead.count == 0, "off on a CPU"
        return answers, server.metric("generation_tokens_total")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with tiny_server(folder, async_scheduling=True) as live:
        yield live


def test_answers_usage_and_counts_are_the_same(
    server: LiveServer, expected: tuple[list[Answer], float]
) -> None:
    ahead = Ahead(server)
    answers = at_once(lambda body: ask(server, body), BODIES)
    assert answers == expected[0]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    assert server.metric("generation_tokens_total") == expected[1]
    server.wait_for(lambda: is_empty(server))
    assert ahead.count > 10


def test_a_client_that_leaves_while_a_step_is_under_way_leaves_no_block(server: LiveServer) -> None:
    body = {
        "prompt": ids(40, seed=50),
        "max_tokens": 500,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    with server.client.stream("POST", COMPLETIONS, json=body) as response:
        events = response.iter_lines()
        for _ in range(5):
            next(events)
    server.wait_for(lambda: is_empty(server))
    assert ask(server, BODIES[0]).finish_reason
