"""The table in README.md is true, and what no other file tests of it."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import POISON
from tests.http.live_server import LiveServer

TESTS = Path(__file__).parent.parent
TABLE = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def test_every_rule_names_tests_that_exist() -> None:
    rules = [line for line in TABLE.splitlines() if re.match(r"\| [A-Z]\d+(, [A-Z]\d+)* \|", line)]
    assert len(rules) > 70
    names: dict[str, set[str]] = {}
    for rule in rules:
        named = re.findall(r"`([\w/]+\.py)::(\w+|\*)`", rule)
        assert named, rule
        for file, test in named:
            if file not in names:
                tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
                names[file] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
            assert test == "*" or test in names[file], f"{file} has no {test}"


def chunks(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.post(path, {**body, "stream": True}).text.split("\n\n")[:-2]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_completion_has_16_tokens_by_default(server: LiveServer) -> None:
    answer = server.complete(prompt="Hello", temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    assert len(answer["choices"]) == 1


def test_an_echoed_prompt_stands_in_the_first_chunk_of_each_choice(server: LiveServer) -> None:
    prompts = ["Hello", "World"]
    found = chunks(
        server, COMPLETIONS, {"prompt": prompts, "n": 2, "echo": True, "temperature": 1, "max_tokens": 4}
    )
    first: dict[int, str] = {}
    for chunk in found:
        (choice,) = chunk["choices"]
        first.setdefault(choice["index"], choice["text"])
    assert {index: text[:5] for index, text in first.items()} == {
        0: "Hello",
        1: "Hello",
        2: "World",
        3: "World",
    }


def test_a_chat_that_says_nothing_has_empty_content(server: LiveServer) -> None:
    choice = server.chat(messages=HELLO, max_tokens=0)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert choice["finish_reason"] == "length"


def test_the_entries_of_all_chunks_are_those_of_the_answer(server: LiveServer) -> None:
    body = {"messages": HELLO, "max_tokens": 40, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    whole = server.chat(**body)["choices"][0]
    choices = [chunk["choices"][0] for chunk in chunks(server, CHAT, body)]
    entries = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    # Text that waits for the rest of its character does not keep its entry back.
    assert any(
        choice["logprobs"] and choice["logprobs"]["content"] and not choice["delta"]["content"]
        for choice in choices[1:]
    )


def test_a_name_changes_nothing_and_a_developer_is_the_system(server: LiveServer) -> None:
    def text(*messages: dict[str, Any]) -> str:
        content: str = server.chat(messages=messages, max_tokens=8, temperature=0)["choices"][0]["message"][
            "content"
        ]
        return content

    assert text({**HELLO[0], "name": "anna"}) == text(HELLO[0])
    instructions = {"role": "system", "content": "Be brief."}
    assert (
        text({**instructions, "role": "developer"}, HELLO[0])
        == text(instructions, HELLO[0])
        != text(HELLO[0])
    )


def test_a_fault_is_not_to_be_retried(server: LiveServer) -> None:
    failed = server.post(COMPLETIONS, {"prompt": [2, POISON], "max_tokens": 4})
    assert failed.status_code == 500
    assert failed.headers["x-should-retry"] == "false"


def test_headers_of_other_tools_are_tolerated(server: LiveServer) -> None:
    headers = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-session-id": "s",
        "x-stainless-retry-count": "1",
        "openai-organization": "o",
        "openai-beta": "b",
    }
    answer = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers=headers)
    assert answer.status_code == 200
    assert "x-gemserve-ignored-parameters" not in answer.headers


@pytest.mark.parametrize("seed", range(3))
def test_text_and_stop_string_begin_the_text_without_it(server: LiveServer, seed: int) -> None:
    body = {"prompt": f"Tale {seed}", "max_tokens": 40, "temperature": 1, "seed": seed}
    whole = server.complete(**body)["choices"][0]["text"]
    for start in range(0, 36, 6):
        stops = [whole[start : start + 1 + start % 4], "zzzz"]
        choice = server.complete(**body, stop=stops)["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert not any(stop in choice["text"] for stop in stops)
        assert whole.startswith(choice["text"] + stops[0])
