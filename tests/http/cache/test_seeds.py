"""A seed gives the same choices, byte for byte, whatever else runs: completions and chats, streamed and not,
under a mixed load; and the choices of one request differ."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.http.cache.tiny_server import CHAT, COMPLETIONS, PLAIN_TEXT, WANDERING, ids, tiny_server
from tests.http.live_server import LiveServer
from tests.http.test_streams import chunks_of

NUM_CHOICES = 3
SEEDED = {"n": NUM_CHOICES, "seed": 77, "max_tokens": 24, "logit_bias": PLAIN_TEXT, **WANDERING}
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": ids(70, seed=1), **SEEDED},
    CHAT: {"messages": [{"role": "user", "content": "Tell me a tale."}], **SEEDED},
}
# Every kind of work, short and long prompts, that comes and goes meanwhile.
LOAD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ids(150, seed=2), "max_tokens": 40, "temperature": 0}),
    (COMPLETIONS, {"prompt": ids(90, seed=3), "max_tokens": 0, "echo": True, "logprobs": 2}),
    (
        COMPLETIONS,
        {"prompt": [ids(5, seed=4), ids(33, seed=5)], "n": 2, "max_tokens": 9, "seed": 77, **WANDERING},
    ),
    (COMPLETIONS, {"prompt": "Now", "guided_regex": "[a-z]{12}", "seed": 5}),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "And you?"}], "max_tokens": 30, "stream": True, "seed": 77},
    ),
    ("/v1/embeddings", {"input": ids(100, seed=6)}),
]


def choices(server: LiveServer, path: str, streamed: bool) -> list[tuple[str, str]]:
    """(text, finish reason) of each choice in its order."""
    if not streamed:
        response = server.post(path, BODIES[path])
        assert response.status_code == 200, response.text
        pieces = response.json()["choices"]
    else:
        pieces = [choice for chunk in chunks_of(server, path, BODIES[path]) for choice in chunk["choices"]]
    texts, reasons = [""] * NUM_CHOICES, [""] * NUM_CHOICES
    for piece in pieces:
        said = (
            piece["text"]
            if path == COMPLETIONS
            else (piece.get("message") or piece["delta"]).get("content", "")
        )
        texts[piece["index"]] += said
        reasons[piece["index"]] = piece["finish_reason"]
    return list(zip(texts, reasons, strict=True))


@pytest.fixture(scope="module")
def served(tiny_folder: Path) -> Iterator[LiveServer]:
    with tiny_server(tiny_folder, max_num_seqs=12) as live:
        yield live


@pytest.fixture(scope="module")
def alone(served: LiveServer) -> dict[str, list[tuple[str, str]]]:
    return {path: choices(served, path, streamed=False) for path in BODIES}


@pytest.mark.parametrize("path", BODIES)
def test_choices_differ_and_repeat(
    served: LiveServer, alone: dict[str, list[tuple[str, str]]], path: str
) -> None:
    assert len(set(alone[path])) == NUM_CHOICES
    assert all(len(text) >= 20 for text, _ in alone[path])
    assert choices(served, path, streamed=False) == alone[path]
    other = served.post(path, {**BODIES[path], "seed": 78}).json()["choices"]
    assert [choice.get("text") or choice["message"]["content"] for choice in other] != [
        text for text, _ in alone[path]
    ]


def keep_busy(server: LiveServer, body: tuple[str, dict[str, Any]], until: threading.Event) -> int:
    """Asks again and again; how often."""
    count = 0
    while not until.is_set():
        response = server.post(*body)
        assert response.status_code == 200, response.text
        count += 1
    return count


def under_load(server: LiveServer, work: Callable[[], None]) -> None:
    done = threading.Event()
    with ThreadPoolExecutor(len(LOAD)) as pool:
        loads = [pool.submit(keep_busy, server, body, done) for body in LOAD]
        try:
            server.wait_for(lambda: server.metric("requests_running") > 1, seconds=60)
            work()
        finally:
            done.set()
        assert all(load.result() > 0 for load in loads)


@pytest.mark.parametrize("path", BODIES)
def test_a_seed_gives_the_same_bytes_under_a_mixed_load(
    served: LiveServer, alone: dict[str, list[tuple[str, str]]], path: str
) -> None:
    def work() -> None:
        for streamed in (False, True):
            for _ in range(2):
                assert choices(served, path, streamed) == alone[path]

    under_load(served, work)
