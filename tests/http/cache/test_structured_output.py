"""Constrained and free requests side by side on the tiny random model: what a choice gets depends on itself
alone."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.http.cache.tiny_server import (
    Answer,
    ask,
    assert_same,
    at_once,
    ids,
    in_one_step,
    is_empty,
    tiny_server,
)
from tests.http.live_server import LiveServer
from tests.server.grammar.walks import SCHEMAS

CONSTRAINTS: list[dict[str, Any]] = [
    {"guided_choice": ["yes", "no", "yesterday"]},
    {"guided_regex": "[0-9]{5}"},
    {"structured_outputs": {"grammar": 'start: "a" tail\ntail: "b" | "(" start ")"'}},
    *({"guided_json": schema} for schema in SCHEMAS.values()),
]
FREE = [
    {"ignore_eos": True, "max_tokens": 40},
    {"max_tokens": 25, "min_tokens": 25},
    {"ignore_eos": True, "max_tokens": 9},
]


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[LiveServer]:
    with tiny_server(tiny_folder, max_num_seqs=16) as live:
        yield live


def requests(seed: int) -> list[dict[str, Any]]:
    common = {"temperature": 1, "logprobs": 1, "seed": seed}
    constrained = [
        {"prompt": ids(9 + i, seed), "max_tokens": 150, **common, **fields}
        for i, fields in enumerate(CONSTRAINTS)
    ]
    free = [{"prompt": ids(30 + i, seed), **common, **fields} for i, fields in enumerate(FREE)]
    return [*constrained, *free]


def check(fields: dict[str, Any], answer: Answer) -> None:
    if answer.finish_reason != "stop":
        assert answer.finish_reason == "length"
        return
    if "guided_json" in fields:
        jsonschema.validate(json.loads(answer.text), fields["guided_json"])
    elif "guided_choice" in fields:
        assert answer.text in fields["guided_choice"]
    elif "guided_regex" in fields:
        assert re.fullmatch(fields["guided_regex"], answer.text)
    else:
        assert re.fullmatch(r"(a\()*ab\)*", answer.text)


@pytest.mark.parametrize("seed", [1, 2])
def test_eight_grammars_and_free_neighbours_get_what_they_get_alone(server: LiveServer, seed: int) -> None:
    """Case 54."""
    bodies = requests(seed)
    alone = [ask(server, body) for body in bodies]
    together = at_once(lambda body: ask(server, body), bodies)
    for body, expected, got in zip(bodies, alone, together, strict=True):
        assert_same(got, expected, usage_too=False)
        check(body, got)
    assert sum(answer.finish_reason == "stop" for answer in alone) >= 6
    server.wait_for(lambda: is_empty(server))


def test_streams_equal_unstreamed_answers(server: LiveServer) -> None:
    for body in requests(3):
        assert_same(ask(server, {**body, "stream": True}), ask(server, body), usage_too=False)


@pytest.mark.parametrize("name", SCHEMAS)
def test_documents_at_temperature_one_parse_and_validate_or_were_cut(server: LiveServer, name: str) -> None:
    bodies = [
        {
            "prompt": ids(8, seed),
            "guided_json": SCHEMAS[name],
            "temperature": 1,
            "max_tokens": 200,
            "seed": seed,
        }
        for seed in range(16)
    ]
    answers = at_once(lambda body: ask(server, body), bodies)
    for body, answer in zip(bodies, answers, strict=True):
        check(body, answer)
    assert sum(answer.finish_reason == "stop" for answer in answers) >= 8


def test_preemption_and_small_chunks_change_nothing(server: LiveServer, tiny_folder: Path) -> None:
    common = {"temperature": 1, "max_tokens": 60, "logprobs": 1}
    bodies: list[dict[str, Any]] = [
        {"prompt": ids(100, 40 + i), "guided_regex": "[0-9 a-z]{70}", "seed": i, **common} for i in range(5)
    ]
    bodies += [{"prompt": ids(100, 50 + i), "ignore_eos": True, "seed": i, **common} for i in range(3)]
    expected = [ask(server, body) for body in bodies]
    with tiny_server(tiny_folder, pool_tokens=448, max_num_batched_tokens=16) as small:
        got = in_one_step(small, lambda body: ask(small, body), bodies)
        preemptions = small.metric("preemptions_total")
    for body, one, other in zip(bodies, got, expected, strict=True):
        assert_same(one, other, usage_too=False)
        assert "guided_regex" not in body or re.fullmatch("[0-9 a-z]{60,70}", one.text)
    assert preemptions > 0


def test_usage_counts_the_tokens_of_the_text(server: LiveServer) -> None:
    answer = ask(
        server,
        {"prompt": ids(8), "guided_regex": "[0-9]{5}", "temperature": 1, "max_tokens": 50, "logprobs": 0},
    )
    assert answer.usage["completion_tokens"] == len(answer.tokens) == 5
    assert answer.finish_reason == "stop"
