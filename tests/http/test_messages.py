"""Anthropic's Messages API over raw HTTP: the same chats as on /v1/chat/completions, in Anthropic's form."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from model.interface.sequence_chunk import ChunkResult, StepInput, StepResult
from tests.fakes import FakeRunner, fake_engine_factory
from tests.http.live_server import LiveServer, live_server
from tests.steps import sequences_of

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Hello"}]


def create(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = server.post(MESSAGES, {"messages": HELLO, "max_tokens": 8, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of all events, whose names are their types."""
    assert response.status_code == 200, response.text
    found = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def stream(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    return events(
        server.post(MESSAGES, {"messages": HELLO, "max_tokens": 8, "temperature": 0, **body, "stream": True})
    )


def refused(
    server: LiveServer, body: dict[str, Any], status: int = 400, path: str = MESSAGES
) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert answer["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert set(answer["error"]) == {"type", "message"}
    server.check_alive()
    error: dict[str, Any] = answer["error"]
    return error


def test_a_message_is_the_chat_completion_in_another_form(server: LiveServer) -> None:
    answer = create(server)
    chat = server.chat(messages=HELLO, max_tokens=8, temperature=0)
    assert answer == {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "model": "fake-gemma",
        "content": [{"type": "text", "text": chat["choices"][0]["message"]["content"]}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": answer["usage"],
    }
    assert answer["id"].startswith("msg_")
    used = answer["usage"]
    assert used["output_tokens"] == 8
    assert used["input_tokens"] + used["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert used["cache_creation_input_tokens"] == 0


def test_the_system_prompt_and_blocks_of_text_are_those_of_a_chat(server: LiveServer) -> None:
    blocks = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    chat = server.chat(
        messages=[{"role": "system", "content": "Be brief."}, *HELLO], max_tokens=8, temperature=0
    )
    for system in ("Be brief.", blocks):
        response = server.post(
            MESSAGES, {"system": system, "messages": HELLO, "max_tokens": 8, "temperature": 0}
        )
        assert response.json()["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        assert "x-gemserve-ignored-parameters" not in response.headers


def test_a_last_message_of_the_assistant_is_continued(server: LiveServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The answer is"}]
    chat = server.chat(messages=messages, max_tokens=8, temperature=0, continue_final_message=True)
    assert create(server, messages=messages)["content"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_cached_tokens_are_not_counted_as_input(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "What is read twice is computed once. " * 3}]
    first, second = create(server, messages=messages)["usage"], create(server, messages=messages)["usage"]
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > 0
    assert second["cache_read_input_tokens"] + second["input_tokens"] == first["input_tokens"]


@pytest.mark.parametrize("streamed", [False, True])
def test_why_it_stopped(server: LiveServer, streamed: bool) -> None:
    def end(**body: Any) -> tuple[str, str | None]:
        if streamed:
            delta = stream(server, **body)[-2]["delta"]
            return delta["stop_reason"], delta["stop_sequence"]
        answer = create(server, **body)
        return answer["stop_reason"], answer["stop_sequence"]

    whole = create(server, max_tokens=40)["content"][0]["text"]
    assert end(max_tokens=40) == ("max_tokens", None)
    stop = whole[20:22]
    assert end(max_tokens=40, stop_sequences=["never", stop]) == ("stop_sequence", stop)
    cut = create(server, max_tokens=40, stop_sequences=["never", stop])["content"][0]["text"]
    assert cut == whole[: whole.index(stop)]
    choice = {"format": {"type": "json_schema", "schema": {"enum": ["yes"]}}}
    assert end(output_config=choice) == ("end_turn", None)
    assert create(server, output_config=choice)["content"][0]["text"] == '"yes"'


def test_the_events_build_up_the_message(server: LiveServer) -> None:
    whole = create(server, temperature=1, seed=5, max_tokens=30)
    found = stream(server, temperature=1, seed=5, max_tokens=30)
    kinds = [event["type"] for event in found]
    assert kinds[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert set(kinds[4:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = found[0]["message"]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert set(start) == set(whole)
    assert found[1] == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    deltas = [event for event in found if event["type"] == "content_block_delta"]
    assert all(event["index"] == 0 and event["delta"]["type"] == "text_delta" for event in deltas)
    assert "".join(event["delta"]["text"] for event in deltas) == whole["content"][0]["text"]
    end = found[-2]
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 30
    # What the client had read before the last event still holds.
    for name in ("input_tokens", "cache_read_input_tokens"):
        assert end["usage"][name] == start["usage"][name]


def test_a_message_without_text_has_no_block(server: LiveServer) -> None:
    assert create(server, max_tokens=0)["content"] == []
    assert [event["type"] for event in stream(server, max_tokens=0)] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


class FailingRunner(FakeRunner):
    """Every sequence fails when it has three tokens."""

    def run(self, step: StepInput) -> StepResult:
        result = super().run(step)
        for index, sequence in enumerate(sequences_of(step)):
            if len(sequence.output_token_ids) == 3:
                result.others[index] = ChunkResult(error="the logits are not finite")
        return result


def test_a_fault_after_the_first_token_is_an_error_event() -> None:
    with live_server(fake_engine_factory(FailingRunner())) as server:
        found = stream(server)
        assert [event["type"] for event in found][:2] == ["message_start", "content_block_start"]
        assert found[-1]["type"] == "error"
        assert found[-1]["error"]["type"] == "api_error"
        failed = server.post(MESSAGES, {"messages": HELLO, "max_tokens": 8})
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "api_error")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"messages": HELLO}, "'max_tokens'"),
        ({"max_tokens": 5}, "'messages'"),
        ({"max_tokens": 5, "messages": []}, "'messages'"),
        ({"max_tokens": -1, "messages": HELLO}, "'max_tokens'"),
        ({"max_tokens": 5, "messages": HELLO, "temperature": 3}, "'temperature'"),
        ({"max_tokens": 5, "messages": HELLO, "stop_sequences": [""]}, "'stop_sequences[0]'"),
        ({"max_tokens": 5, "messages": HELLO, "stop_sequences": ["x"] * 17}, "'stop_sequences'"),
        ({"max_tokens": 5, "messages": [{"role": "user"}]}, "'messages[0].content'"),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": []}]}, "'messages[0].content'"),
        ({"max_tokens": 5, "messages": [{"role": "robot", "content": "a"}]}, "'messages[0].role'"),
        (
            {"max_tokens": 5, "messages": [{"role": "assistant", "content": "a"}], "system": "b"},
            "'messages[0].role'",
        ),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "this server takes text",
        ),
        (
            {"max_tokens": 5, "messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            "'thinking'",
        ),
        (
            {
                "max_tokens": 5,
                "messages": HELLO,
                "output_config": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}},
            },
            "'output_config.format.schema'",
        ),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_wrong_request_is_a_400_that_names_the_field(
    server: LiveServer, body: dict[str, Any], part: str, streamed: bool
) -> None:
    error = refused(server, {**body, "stream": streamed})
    assert error["type"] == "invalid_request_error"
    assert part in error["message"]


def test_what_means_off_is_accepted_and_the_rest_is_named(server: LiveServer) -> None:
    body = {
        "max_tokens": 2,
        "messages": HELLO,
        "tools": [],
        "tool_choice": {"type": "none"},
        "thinking": {"type": "disabled"},
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "top_k": 3,
        "top_p": 0.5,
        "inference_geo": "moon",
        "stop_sequences": None,
    }
    response = server.post(
        MESSAGES, body, headers={"anthropic-version": "2023-06-01", "anthropic-beta": "none"}
    )
    assert response.status_code == 200, response.text
    assert response.headers["x-gemserve-ignored-parameters"] == "inference_geo, metadata, service_tier"


def test_strictness_holds_here_too(strict_server: LiveServer) -> None:
    twice = {"max_tokens": 2, "system": "s", "messages": [*HELLO, *HELLO]}
    assert "'messages[1].role'" in refused(strict_server, twice)["message"]
    assert "'moon'" in refused(strict_server, {"max_tokens": 2, "messages": HELLO, "moon": 1})["message"]
    assert (
        "maximum context length" in refused(strict_server, {"max_tokens": 2000, "messages": HELLO})["message"]
    )


def test_other_errors_have_the_same_shape(server: LiveServer) -> None:
    assert (
        refused(server, {"model": "claude", "max_tokens": 2, "messages": HELLO}, 404)["type"]
        == "not_found_error"
    )
    assert server.post(MESSAGES + "/batches", {}).json()["error"]["type"] == "not_found_error"
    assert server.client.get(MESSAGES).json()["error"]["type"] == "invalid_request_error"
    broken = server.client.post(MESSAGES, content=b"{", headers={"content-type": "application/json"})
    assert broken.json()["error"]["type"] == "invalid_request_error"
    too_long = [{"role": "user", "content": "words " * 2000}]
    assert (
        "maximum context length is 512 tokens"
        in refused(server, {"max_tokens": 2, "messages": too_long})["message"]
    )


def test_the_length_of_a_prompt(server: LiveServer) -> None:
    for body in (
        {"messages": HELLO},
        {"system": "Be brief.", "messages": HELLO},
        {"messages": [*HELLO, {"role": "assistant", "content": "The"}]},
    ):
        counted = server.post(COUNT, body)
        assert counted.status_code == 200, counted.text
        used = create(server, **body)["usage"]
        assert counted.json() == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}
    assert refused(server, {"messages": []}, path=COUNT)["type"] == "invalid_request_error"
    assert refused(server, {"model": "x", "messages": HELLO}, 404, path=COUNT)["type"] == "not_found_error"
    assert "tools" in refused(server, {"messages": HELLO, "tools": [{}]}, path=COUNT)["message"]


def test_messages_are_counted_in_the_metrics(server: LiveServer) -> None:
    def outcomes() -> float:
        return sum(
            server.metric("requests_total", endpoint="messages", stream=streamed, outcome="length")
            for streamed in ("true", "false")
        )

    def rejections() -> float:
        return server.metric("request_rejections_total", endpoint="messages", reason="invalid")

    before = outcomes(), rejections()
    create(server)
    stream(server)
    refused(server, {})
    assert (outcomes(), rejections()) == (before[0] + 2, before[1] + 1)


@pytest.fixture(scope="module")
def guarded() -> Iterator[LiveServer]:
    with live_server(api_key=("first-key",)) as live:
        yield live


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "first-key")], 200),
        ([("authorization", "Bearer first-key")], 200),
        # A client that knows two keys sends both.
        ([("authorization", "Bearer other"), ("x-api-key", "first-key")], 200),
        ([("x-api-key", "first-kez")], 401),
        ([("x-api-key", "Bearer first-key")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "first-key"), ("x-api-key", "first-key")], 401),
        ([], 401),
    ],
)
def test_the_key_in_its_own_header(guarded: LiveServer, headers: list[tuple[str, str]], status: int) -> None:
    response = guarded.post(MESSAGES, {"messages": HELLO, "max_tokens": 2}, headers=headers)
    assert response.status_code == status
    if status == 401:
        assert response.json()["error"]["type"] == "authentication_error"
    assert guarded.client.get("/v1/models", headers=headers).status_code == status
