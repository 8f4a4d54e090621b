"""Tools of chat completions over HTTP: what becomes a call, free or constrained, streamed as in one piece."""

import json
from typing import Any

import jsonschema
import pytest

from tests.http.live_server import LiveServer
from tests.http.test_streams import STREAM_USAGE, chunks_of
from tests.http.tool_requests import (
    ARGUMENTS,
    CALL,
    CHAT,
    FENCED,
    MESSAGES,
    NAMED,
    NO_CALL,
    NOTHING,
    ONLY_CALL,
    PAIR,
    PLAIN,
    RANDOM,
    SCHEMA,
    TEXTS,
    TOOLS,
    TWO_CALLS,
    ask,
    called,
    described,
    streamed,
    without_ids,
)
from tests.scripted import TOKENIZER


@pytest.fixture
def server(scripted: LiveServer) -> LiveServer:
    return scripted


# -- calls that the model decides on -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "content", "calls"),
    [
        (ONLY_CALL, None, [("get_weather", ARGUMENTS)]),
        (PLAIN, TEXTS[PLAIN], []),
        (TWO_CALLS, "Let me see.", [("get_weather", ARGUMENTS), ("get_time", "{}")]),
        (NO_CALL, TEXTS[NO_CALL], []),
        (FENCED, "\nDone.", [("get_weather", ARGUMENTS)]),
        (NOTHING, "", []),
    ],
)
def test_calls_are_read_from_the_text_streamed_or_not(
    server: LiveServer, seed: int, content: str | None, calls: list[tuple[str, str]]
) -> None:
    whole = ask(server, seed)
    assert whole["message"]["content"] == content
    assert ("tool_calls" in whole["message"]) == bool(calls)
    assert called(whole) == calls
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
    stream, _ = streamed(server, seed)
    assert without_ids(stream) == without_ids(whole)


def test_a_streamed_call_begins_with_its_name_and_grows(server: LiveServer) -> None:
    _, chunks = streamed(server, ONLY_CALL)
    assert chunks[0]["delta"] == {"role": "assistant", "content": None}
    first = chunks[1]["delta"]["tool_calls"][0]
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    grown = [chunk["delta"]["tool_calls"][0]["function"]["arguments"] for chunk in chunks[2:-1]]
    assert len(grown) > 10
    assert "".join(grown) == ARGUMENTS
    assert all("content" not in chunk["delta"] for chunk in chunks[1:])
    assert (chunks[-1]["delta"], chunks[-1]["finish_reason"]) == ({}, "tool_calls")
    assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])


def test_plain_text_comes_token_by_token_as_without_tools(server: LiveServer) -> None:
    with_tools, chunks = streamed(server, PLAIN)
    without, plain_chunks = streamed(server, PLAIN, tools=None)
    assert with_tools == without
    texts, plain_texts = (
        [chunk["delta"].get("content") for chunk in choices] for choices in (chunks, plain_chunks)
    )
    # Only the line breaks in front of the bracket, and the bracket, waited for what came next.
    waited = plain_texts.index("\n")
    assert texts == [*plain_texts[:waited], "\n\n[1", *plain_texts[waited + 3 :]]


def test_choices_call_each_for_itself(server: LiveServer) -> None:
    body = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "seed": ONLY_CALL,
        "temperature": 1,
        "max_tokens": 300,
        "n": 3,
    }
    answer = server.chat(**body)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["tool_calls", "stop", "tool_calls"]
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == 3
    for index, choice in enumerate(answer["choices"]):
        assert without_ids(streamed(server, ONLY_CALL, index, n=3)[0]) == without_ids(choice)


@pytest.mark.parametrize("seed", [ONLY_CALL, TWO_CALLS, PLAIN])
def test_log_probabilities_are_those_of_every_token(server: LiveServer, seed: int) -> None:
    whole = ask(server, seed, logprobs=True, top_logprobs=1, return_token_ids=True)
    entries = whole["logprobs"]["content"]
    assert len(entries) == len(whole["token_ids"]) == len(TOKENIZER.encode_plain(TEXTS[seed])) + 1
    stream, chunks = streamed(server, seed, logprobs=True, top_logprobs=1)
    assert [
        entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]
    ] == entries
    assert without_ids(stream) == without_ids(whole)
    said = b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode()
    assert said == TEXTS[seed]


def test_without_parallel_calls_the_first_one_is_the_last(server: LiveServer) -> None:
    choice = ask(server, TWO_CALLS, parallel_tool_calls=False)
    assert called(choice) == [("get_weather", ARGUMENTS)]
    assert choice["finish_reason"] == "tool_calls"
    generated = server.metric("generation_tokens_total")
    answer = server.chat(
        messages=MESSAGES,
        tools=TOOLS,
        seed=TWO_CALLS,
        temperature=1,
        max_tokens=300,
        parallel_tool_calls=False,
    )
    assert answer["usage"]["completion_tokens"] == server.metric("generation_tokens_total") - generated
    assert answer["usage"]["completion_tokens"] < len(PAIR)
    assert without_ids(streamed(server, TWO_CALLS, parallel_tool_calls=False)[0]) == without_ids(choice)


def test_a_limit_cuts_a_call(server: LiveServer) -> None:
    for limit in (1, 8, 9, 30, 42, 50, len(CALL) - 2):
        choice = ask(server, ONLY_CALL, max_tokens=limit)
        assert choice["finish_reason"] == "length"
        assert not choice["message"]["content"] or limit < len('{"name":')
        if called(choice):
            assert ARGUMENTS.startswith(called(choice)[0][1])
    assert called(ask(server, ONLY_CALL, max_tokens=len(CALL) - 2))[0][1] == ARGUMENTS[:-1]
    stream, _ = streamed(server, ONLY_CALL, max_tokens=50)
    assert without_ids(stream) == without_ids(ask(server, ONLY_CALL, max_tokens=50))


def test_stop_texts_end_text_and_calls(server: LiveServer) -> None:
    choice = ask(server, TWO_CALLS, stop=["see"])
    assert (choice["message"]["content"], called(choice), choice["finish_reason"]) == ("Let me ", [], "stop")
    cut = ask(server, ONLY_CALL, stop=["days"])
    assert called(cut) == [("get_weather", '{"city":"Paris","')]
    assert without_ids(streamed(server, ONLY_CALL, stop=["days"])[0]) == without_ids(cut)


# -- calls that must be made ---------------------------------------------------------------------------------

ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED], ids=["required", "named", "allowed"])
def test_a_call_that_must_be_made_follows_its_schema(server: LiveServer, choice: Any) -> None:
    names = set()
    for seed in range(RANDOM, RANDOM + 4):
        # Without a preference a list of calls goes on and on.
        options = {"tool_choice": choice, "max_tokens": 200, "parallel_tool_calls": seed % 2 == 0}
        answer = ask(server, seed, **options)
        stream, _ = streamed(server, seed, **options)
        assert without_ids(stream) == without_ids(answer)
        if answer["finish_reason"] == "length":
            continue
        assert answer["finish_reason"] == ("stop" if choice is NAMED else "tool_calls")
        assert answer["message"]["content"] is None
        for name, arguments in called(answer):
            names.add(name)
            schema = SCHEMA if name == "get_weather" else {"type": "object", "maxProperties": 0}
            jsonschema.validate(json.loads(arguments), schema)
        assert len(called(answer)) >= 1
        assert choice is not NAMED or len(called(answer)) == 1
    assert names == ({"get_weather", "get_time"} if choice == "required" else {"get_weather"})


def test_what_must_be_called_does_not_depend_on_what_the_model_prefers(server: LiveServer) -> None:
    for seed in (PLAIN, NOTHING):
        choice = ask(server, seed, tool_choice="required", parallel_tool_calls=False, max_tokens=400)
        assert len(called(choice)) == 1
        assert choice["finish_reason"] == "tool_calls"


def test_a_call_that_is_cut_before_its_name_is_no_content(server: LiveServer) -> None:
    choice = ask(server, RANDOM, tool_choice="required", max_tokens=4)
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert choice["finish_reason"] == "length"
    assert without_ids(streamed(server, RANDOM, tool_choice="required", max_tokens=4)[0]) == without_ids(
        choice
    )


def test_the_same_seed_makes_the_same_calls(server: LiveServer) -> None:
    first, again = (ask(server, RANDOM + 5, tool_choice="required", max_tokens=400) for _ in range(2))
    assert without_ids(first) == without_ids(again)


def test_text_with_a_format_or_calls(server: LiveServer) -> None:
    """With a response format the answer is either valid or a call, and both are constrained."""
    response_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no"]}}}
    seen = set()
    for seed in range(RANDOM, RANDOM + 8):
        choice = ask(server, seed, response_format=response_format, parallel_tool_calls=False, max_tokens=400)
        seen.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            assert choice["message"]["content"] in ('"yes"', '"no"')
        for name, arguments in called(choice):
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "get_weather" else {})
    assert seen == {"stop", "tool_calls"}
    must = ask(server, RANDOM, response_format=response_format, tool_choice=NAMED)
    assert must["message"]["content"] is None


def test_outcomes_are_counted(server: LiveServer) -> None:
    labels = {"endpoint": "chat_completions", "stream": "false", "outcome": "tool_calls"}
    before, choices = (
        server.metric("requests_total", **labels),
        server.metric("choices_total", finish_reason="tool_calls"),
    )
    ask(server, ONLY_CALL)
    assert server.metric("requests_total", **labels) == before + 1
    assert server.metric("choices_total", finish_reason="tool_calls") == choices + 1


def test_answers_with_calls_are_as_described(server: LiveServer) -> None:
    body = {
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": NAMED,
        "seed": TWO_CALLS,
        "temperature": 1,
        "max_tokens": 300,
    }
    jsonschema.validate(body, described(server, "ChatCompletionRequest"))
    jsonschema.validate(
        server.chat(**{**body, "tool_choice": "auto"}), described(server, "ChatCompletionResponse")
    )


def test_usage_of_a_stream_with_calls_is_that_of_the_whole(server: LiveServer) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "seed": TWO_CALLS, "temperature": 1, "max_tokens": 300}
    usage = chunks_of(server, CHAT, {**body, **STREAM_USAGE})[-1]["usage"]
    assert (
        usage["completion_tokens"]
        == server.chat(**body)["usage"]["completion_tokens"]
        == len(TOKENIZER.encode_plain(PAIR)) + 1
    )
