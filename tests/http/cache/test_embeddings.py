"""Embeddings of the tiny model equal those of the bare network, whatever was cached, however long the input,
beside what generates."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from model.interface.kv_cache_spec import KVCachePlan
from model.interface.sequence_chunk import StepInput
from tests.http.cache.tiny_server import TOLERANCE, ask, at_once, ids, is_empty, tiny_server
from tests.http.live_server import LiveServer
from tests.tiny import tiny_runner


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[LiveServer]:
    with tiny_server(tiny_folder, pool_tokens=1024) as live:
        yield live


def direct(token_ids: list[int]) -> list[float]:
    """One pass of the network over all tokens, in a cache of its own."""
    num_blocks = -(-len(token_ids) // 16)
    runner = tiny_runner(KVCachePlan(num_blocks + 1, num_blocks + 1, 0, 0, num_blocks * 16))
    table = list(range(1, num_blocks + 1))
    step = StepInput.of_prompt(token_ids, table)
    mean = runner.hidden_states(step).mean(0).double().numpy()
    values: list[float] = (mean / np.linalg.norm(mean)).tolist()
    return values


def embed(server: LiveServer, inputs: list[list[int]]) -> list[list[float]]:
    response = server.post("/v1/embeddings", {"input": inputs})
    assert response.status_code == 200, response.text
    return [item["embedding"] for item in response.json()["data"]]


def test_embeddings_are_those_of_the_network(server: LiveServer) -> None:
    inputs = [ids(length, length) for length in (1, 2, 16, 17, 63, 64, 65, 200, 700)]
    once = [direct(token_ids) for token_ids in inputs]
    for _ in range(2):  # the second time everything is cached
        for got, expected in zip(embed(server, inputs), once, strict=True):
            assert got == pytest.approx(expected, abs=TOLERANCE)
    server.wait_for(lambda: is_empty(server), 60)


def test_neighbours_that_generate_change_nothing_and_are_not_changed(server: LiveServer) -> None:
    body = {"prompt": ids(40, 99), "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = ask(server, body)
    inputs = [[ids(90 + index, index), ids(300, 50 + index)] for index in range(3)]
    expected = [[direct(token_ids) for token_ids in pair] for pair in inputs]

    def work(index: int) -> object:
        return ask(server, {**body, "stream": True}) if index == 3 else embed(server, inputs[index])

    *embedded, streamed = at_once(work, range(4))
    assert streamed.text == alone.text  # type: ignore[attr-defined]
    for got, wanted in zip(embedded, expected, strict=True):
        assert np.asarray(got) == pytest.approx(np.asarray(wanted), abs=TOLERANCE)
    server.wait_for(lambda: is_empty(server), 60)
