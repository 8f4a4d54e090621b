"""Tools of the Messages API over raw HTTP: the calls of the same chat, in Anthropic's form, streamed as in
one piece."""

import json
from typing import Any

import jsonschema
import pytest

from tests.http.live_server import LiveServer
from tests.http.test_messages import COUNT, MESSAGES, events, refused
from tests.http.tool_requests import (
    ARGUMENTS,
    FAILING,
    FENCED,
    NO_CALL,
    NOTHING,
    ONLY_CALL,
    PLAIN,
    RANDOM,
    SCHEMA,
    TEXTS,
    TOOLS,
    TWO_CALLS,
)
from tests.scripted import TOKENIZER, scripted_server

ASKED = [{"role": "user", "content": "Weather?"}]
OFFERED: list[dict[str, Any]] = [
    {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA},
    {"name": "get_time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}},
]
# The same functions on the chat endpoint; a schema must be given here.
SAME_TOOLS = [
    TOOLS[0],
    {"type": "function", "function": {"name": "get_time", "parameters": OFFERED[1]["input_schema"]}},
]
INPUT = json.loads(ARGUMENTS)


@pytest.fixture
def server(scripted: LiveServer) -> LiveServer:
    return scripted


def request(seed: int, **fields: Any) -> dict[str, Any]:
    return {"messages": ASKED, "tools": OFFERED, "seed": seed, "temperature": 1, "max_tokens": 300, **fields}


def create(server: LiveServer, seed: int, **fields: Any) -> dict[str, Any]:
    response = server.post(MESSAGES, request(seed, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def put_together(found: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """(blocks, stop reason) as a client makes them of the events; the order of the events is checked on the
    way."""
    kinds = [event["type"] for event in found]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("ping") <= 1
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    is_open = False
    for event in found[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                delta = event["delta"]
                if delta["type"] == "text_delta":
                    blocks[-1]["text"] += delta["text"]
                else:
                    assert delta["type"] == "input_json_delta"
                    assert blocks[-1]["type"] == "tool_use"
                    assert blocks[-1]["input"] == {}
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
                is_open = False
            case kind:
                assert kind == "ping"
    assert not is_open
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return blocks, found[-2]["delta"]["stop_reason"]


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ids = [block["id"] for block in blocks if "id" in block]
    assert len(set(ids)) == len(ids)
    assert all(call_id.startswith("toolu_") for call_id in ids)
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def call(name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "name": name, "input": given}


@pytest.mark.parametrize(
    ("seed", "blocks"),
    [
        (ONLY_CALL, [call("get_weather", INPUT)]),
        (PLAIN, [text(TEXTS[PLAIN])]),
        (TWO_CALLS, [text("Let me see."), call("get_weather", INPUT), call("get_time", {})]),
        (NO_CALL, [text(TEXTS[NO_CALL])]),
        (FENCED, [call("get_weather", INPUT), text("\nDone.")]),
        (NOTHING, []),
    ],
)
def test_calls_are_blocks_in_their_order_streamed_or_not(
    server: LiveServer, seed: int, blocks: list[dict[str, Any]]
) -> None:
    whole = create(server, seed)
    assert without_ids(whole["content"]) == blocks
    assert whole["stop_reason"] == (
        "tool_use" if any(block["type"] == "tool_use" for block in blocks) else "end_turn"
    )
    streamed, reason = put_together(events(server.post(MESSAGES, request(seed, stream=True))))
    assert (without_ids(streamed), reason) == (blocks, whole["stop_reason"])


def test_an_input_grows_token_by_token(server: LiveServer) -> None:
    found = events(server.post(MESSAGES, request(ONLY_CALL, stream=True)))
    pieces = [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]
    assert len(pieces) > 10
    assert "".join(pieces) == ARGUMENTS
    start = next(event for event in found if event["type"] == "content_block_start")
    assert without_ids([start["content_block"]]) == [call("get_weather", {})]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("choice", "names", "count"),
    [
        ({"type": "any"}, {"get_weather", "get_time"}, None),
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "get_time"}, 1),
        ({"type": "tool", "name": "get_weather"}, {"get_weather"}, 1),
    ],
)
def test_calls_that_must_be_made_follow_their_schemas(
    server: LiveServer, choice: dict[str, Any], names: set[str], count: int | None, streamed: bool
) -> None:
    for seed in range(RANDOM, RANDOM + 3):
        fields = {"tool_choice": choice, "max_tokens": 1200}
        if streamed:
            blocks, reason = put_together(events(server.post(MESSAGES, request(seed, **fields, stream=True))))
        else:
            answer = create(server, seed, **fields)
            blocks, reason = answer["content"], answer["stop_reason"]
        assert reason in ("tool_use", "max_tokens")
        if reason == "max_tokens":
            continue
        assert {block["type"] for block in blocks} == {"tool_use"}
        assert {block["name"] for block in blocks} <= names
        assert count is None or len(blocks) == count
        for block in blocks:
            jsonschema.validate(
                block["input"],
                next(tool["input_schema"] for tool in OFFERED if tool["name"] == block["name"]),
            )


def test_one_call_at_most_ends_the_text_with_it(server: LiveServer) -> None:
    one = create(server, TWO_CALLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert without_ids(one["content"]) == [text("Let me see."), call("get_weather", INPUT)]
    assert one["stop_reason"] == "tool_use"


def test_none_is_the_text_as_it_is(server: LiveServer) -> None:
    whole = create(server, ONLY_CALL, tool_choice={"type": "none"})
    assert (whole["content"], whole["stop_reason"]) == ([text(TEXTS[ONLY_CALL])], "end_turn")
    alone = server.post(MESSAGES, {"messages": ASKED, "max_tokens": 1}).json()["usage"]
    told = create(server, ONLY_CALL, tool_choice={"type": "none"}, max_tokens=1)["usage"]
    assert (
        alone["input_tokens"] + alone["cache_read_input_tokens"]
        == told["input_tokens"] + told["cache_read_input_tokens"]
    )


@pytest.mark.parametrize("num_tokens", [30, *range(34, 62, 3)])
def test_a_call_that_was_cut_holds_what_is_complete(server: LiveServer, num_tokens: int) -> None:
    """As Anthropic's client reads it from the stream."""
    found = events(server.post(MESSAGES, request(ONLY_CALL, max_tokens=num_tokens, stream=True)))
    partial = "".join(
        event["delta"].get("partial_json", "") for event in found if event["type"] == "content_block_delta"
    )
    whole = create(server, ONLY_CALL, max_tokens=num_tokens)
    assert whole["stop_reason"] == found[-2]["delta"]["stop_reason"] == "max_tokens"
    assert ARGUMENTS.startswith(partial)
    if not partial:
        assert whole["content"] == []
        return
    (block,) = whole["content"]
    assert block["input"].items() <= {**INPUT, "days": block["input"].get("days")}.items()
    assert ("city" in block["input"]) == ('"Paris"' in partial)


def test_arguments_that_are_no_json_are_no_input() -> None:
    wrong = ["{'city': 1}", '{"city": NaN}', '{"city": 1e999}', '{"city": "\\ud800"}', '{"city" "Rome"}']
    texts = [f'{{"name": "get_weather", "parameters": {arguments}}}' for arguments in wrong]
    with scripted_server(texts) as server:
        for seed in range(len(texts)):
            assert without_ids(create(server, seed)["content"]) == [call("get_weather", {})]


def test_a_stop_sequence_in_a_call_cuts_it(server: LiveServer) -> None:
    cut = create(server, ONLY_CALL, stop_sequences=["days"])
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", "days")
    assert without_ids(cut["content"]) == [call("get_weather", {"city": "Paris"})]


def test_a_fault_in_a_call_is_an_error_event(server: LiveServer) -> None:
    found = events(server.post(MESSAGES, request(FAILING, stream=True)))
    assert found[-1]["type"] == "error"


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "tool", "name": "f" * 128}])
def test_names_and_schemas_may_be_all_that_anthropics_api_takes(
    server: LiveServer, choice: dict[str, Any]
) -> None:
    offered = {"name": "f" * 128, "input_schema": {"type": "object", "properties": None, "required": None}}
    answer = create(server, RANDOM, tools=[offered], tool_choice=choice, max_tokens=200)
    if choice["type"] == "tool":
        assert [block["name"] for block in answer["content"]] == ["f" * 128]


# -- earlier turns -------------------------------------------------------------------------------------------


def prompt_of(server: LiveServer, body: dict[str, Any]) -> str:
    tokens = server.post("/tokenize", body).json()["tokens"]
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def test_calls_and_results_of_earlier_turns_are_those_of_a_chat(server: LiveServer) -> None:
    called = create(server, TWO_CALLS)["content"]
    ids = [block["id"] for block in called if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": ids[0], "content": [text("20 "), text("degrees")]},
        {"type": "tool_result", "tool_use_id": ids[1], "content": "no clock", "is_error": True},
        text("And tomorrow?"),
    ]
    turns = [*ASKED, {"role": "assistant", "content": called}, {"role": "user", "content": results}]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": block["name"], "arguments": given}}
        for call_id, block, given in zip(ids, called[1:], (ARGUMENTS, "{}"), strict=True)
    ]
    chat = [
        *ASKED,
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": ids[0], "content": "20 degrees"},
        {"role": "tool", "tool_call_id": ids[1], "content": "The call failed: no clock"},
        {"role": "user", "content": "And tomorrow?"},
    ]
    counted = server.post(COUNT, {"messages": turns, "tools": OFFERED})
    assert counted.status_code == 200, counted.text
    same = server.chat(messages=chat, tools=SAME_TOOLS, seed=PLAIN, max_tokens=1)["usage"]["prompt_tokens"]
    assert counted.json() == {"input_tokens": same}
    used = create(server, PLAIN, messages=turns)["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == same
    shown = prompt_of(server, {"messages": chat, "tools": SAME_TOOLS})
    assert "Result of get_time:\n```tool_output\nThe call failed: no clock\n```\n\nAnd tomorrow?" in shown


def test_a_result_may_be_empty_and_blocks_may_carry_what_clients_add(server: LiveServer) -> None:
    used = {
        "type": "tool_use",
        "id": "a",
        "name": "get_time",
        "input": {},
        "caller": {"type": "direct"},
        "toolset_name": None,
    }
    contents: list[dict[str, Any]] = [{}, {"content": []}, {"content": None}, {"content": ""}]
    for content in contents:
        result = {
            "type": "tool_result",
            "tool_use_id": "a",
            "cache_control": {"type": "ephemeral"},
            **content,
        }
        turns = [*ASKED, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
        response = server.post(MESSAGES, request(PLAIN, messages=turns))
        assert response.status_code == 200, response.text
        assert "x-gemserve-ignored-parameters" not in response.headers


def test_strict_roles_take_a_turn_of_results_and_text() -> None:
    used = {"type": "tool_use", "id": "a", "name": "get_time", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "10"}
    with scripted_server(TEXTS, strict_roles=True) as strict:
        turns = [
            *ASKED,
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result, text("Well?")]},
        ]
        assert create(strict, PLAIN, messages=turns, system="s")["stop_reason"] == "end_turn"
        lost = [*ASKED, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": [result]}]
        assert "messages[2].role" in refused(strict, request(PLAIN, messages=lost))["message"]


def test_the_length_of_a_prompt_with_tools(server: LiveServer) -> None:
    for fields in (
        {},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "none"}},
        {"system": "Be brief."},
    ):
        counted = server.post(COUNT, {"messages": ASKED, "tools": OFFERED, **fields})
        used = create(server, PLAIN, **fields)["usage"]
        assert counted.json() == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
