"""The whole server over real sockets with the tiny random model in float32, its cache sized in tokens, its
books checked after every step; and what tests send to it and compare."""

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from server.loading.load import load_engine
from tests.http.live_server import LiveServer, live_server
from tests.server.text.small_tokenizer import (
    BYTES,
    CHARACTERS,
    CONTROL,
    MERGES,
    TEXT_ADDED,
    build_library_tokenizer,
)
from tests.tiny import HF_CONFIG, tiny_config

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# float32 sums in another order (other matrix shapes for other chunks and batches) differ by about 1e-6.
TOLERANCE = 1e-4

VOCAB_SIZE = int(str(HF_CONFIG["vocab_size"]))
FIRST_CHARACTER = len(CONTROL) + len(TEXT_ADDED) + len(BYTES)
NUM_TOKENS = FIRST_CHARACTER + len(CHARACTERS) + len(MERGES)  # the model has more; those ids have no text


def only(tokens: range) -> dict[str, int]:
    """A logit_bias that leaves nothing but these tokens."""
    return {str(token): -100 for token in range(VOCAB_SIZE) if token not in tokens}


# Every generated token then has a text of its own, and its id can be told from it.
PLAIN_TEXT = only(range(FIRST_CHARACTER, NUM_TOKENS))
# A run of digits is encoded into the very ids that generated it: no merge joins them.
DIGITS = range(FIRST_CHARACTER + CHARACTERS.index("0"), FIRST_CHARACTER + CHARACTERS.index("9") + 1)
ONLY_DIGITS = only(DIGITS)
# The tiny model likes to repeat its last token; with these, answers wander.
WANDERING = {"temperature": 2, "frequency_penalty": 1}

Item = TypeVar("Item")
Result = TypeVar("Result")


def ids(length: int, seed: int = 0) -> list[int]:
    """A prompt of its own for every seed."""
    return [2, *random.Random(seed).choices(range(20, NUM_TOKENS), k=length - 1)]


def id_of_text() -> dict[str, int]:
    vocabulary = build_library_tokenizer().get_vocab()
    return {
        token.replace("▁", " "): token_id
        for token, token_id in vocabulary.items()
        if token_id >= FIRST_CHARACTER
    }


def cache_memory(
    pool_tokens: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, prefix_caching: bool
) -> int:
    """The smallest --kv-cache-memory whose global pool holds so many tokens."""
    spec = tiny_config().kv_cache_spec(block_size, 4)
    memory = (
        spec.local_pool_blocks(max_num_seqs, max_num_batched_tokens) * spec.local_block_bytes
        + 2 * spec.global_block_bytes
    )
    while True:
        plan = spec.plan(
            memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=tiny_config().max_position_embeddings,
            prefix_caching=prefix_caching,
        )
        if plan.capacity_tokens >= pool_tokens:
            return memory
        memory += spec.global_block_bytes


@contextlib.contextmanager
def tiny_server(
    folder: Path,
    *,
    pool_tokens: int = 4096,
    block_size: int = 16,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    prefix_caching: bool = True,
    **settings: Any,
) -> Iterator[LiveServer]:
    memory = cache_memory(pool_tokens, block_size, max_num_seqs, max_num_batched_tokens, prefix_caching)
    with live_server(
        load_engine,
        wait=False,
        model=str(folder),
        dtype="float32",
        num_threads=1,
        kv_cache_memory=memory,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=prefix_caching,
        debug_invariants=True,
        **settings,
    ) as live:
        live.client.timeout = httpx.Timeout(60)
        live.wait_for(lambda: live.client.get("/health/ready").status_code == 200, seconds=60)
        yield live


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, streamed or not. ``tokens`` and ``logprobs`` are empty where they were not asked for."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    finish_reason: str
    usage: dict[str, Any]

    @property
    def cached_tokens(self) -> int:
        cached: int = self.usage["prompt_tokens_details"]["cached_tokens"]
        return cached


def ask(server: LiveServer, body: dict[str, Any]) -> Answer:
    """A completion of one choice; a streamed one is put together."""
    if not body.get("stream"):
        whole = server.complete(**body)
        pieces, usage = whole["choices"], whole["usage"]
    else:
        response = server.post(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line) for line in lines]
        usage = chunks.pop()["usage"]
        pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    lists = [piece["logprobs"] for piece in pieces if piece["logprobs"]]
    return Answer(
        "".join(piece["text"] for piece in pieces),
        tuple(token for entry in lists for token in entry["tokens"]),
        tuple(value for entry in lists for value in entry["token_logprobs"]),
        pieces[-1]["finish_reason"],
        usage,
    )


def assert_same(got: Answer, expected: Answer, *, usage_too: bool = True) -> None:
    """Text, tokens and reason exactly, log-probabilities within the rounding of float32."""
    assert got.text == expected.text
    assert got.tokens == expected.tokens
    assert got.finish_reason == expected.finish_reason
    assert_close(got.logprobs, expected.logprobs)
    if usage_too:
        assert got.usage == expected.usage


def assert_close(got: Sequence[float | None], expected: Sequence[float | None]) -> None:
    assert [value is None for value in got] == [value is None for value in expected]
    assert [value for value in got if value is not None] == pytest.approx(
        [value for value in expected if value is not None], abs=TOLERANCE
    )


def at_once(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``work`` on every item at the same time, results in order."""
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(work, items))


def in_one_step(server: LiveServer, work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """``at_once`` for requests that must meet in the engine, however slowly their clients start or fast the
    model is: no step begins before as many are open as there are items."""
    engine = server.app.state.server.loaded.engine
    core = engine._core
    step, open_in_time = core.step, time.monotonic() + 60

    def step_when_all_are_open() -> object:
        while engine.num_streams < len(items):
            assert time.monotonic() < open_in_time, "a request did not reach the engine"
            time.sleep(0.001)
        core.step = step
        return step()

    core.step = step_when_all_are_open
    return at_once(work, items)


def used_blocks(server: LiveServer, pool: str) -> float:
    return server.metric("kv_cache_blocks", pool=pool, state="used")


def is_empty(server: LiveServer) -> bool:
    """Nothing runs or waits, and no block is held; cached ones are free."""
    return server.is_idle() and used_blocks(server, "global") == 0 and used_blocks(server, "local") == 0
