"""Bodies of the Messages API: text is one block, kinds that are not here are named, and so are tools that run
elsewhere."""

from typing import Any

import pytest
from pydantic import ValidationError

from server.api.messages.request import MessagesRequest

USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"messages": [USER], "max_tokens": 3, **fields})


def refusal(**fields: Any) -> tuple[str, str]:
    with pytest.raises(ValidationError) as refused:
        body(**fields)
    first = refused.value.errors(include_url=False)[0]
    return first["type"], first["msg"]


def test_text_is_one_block() -> None:
    given = body(system="be brief")
    assert [(block.type, block.text) for block in given.messages[0].content] == [("text", "hi")]
    assert given.system is not None
    assert given.system[0].text == "be brief"


def test_max_tokens_is_required_and_may_be_zero() -> None:
    assert body(max_tokens=0).max_tokens == 0
    with pytest.raises(ValidationError, match="max_tokens"):
        MessagesRequest.model_validate({"messages": [USER]})


@pytest.mark.parametrize(
    ("content", "kind", "text"),
    [
        ([], "empty_array", "at least one content block"),
        (5, "invalid_type", "a string or a list of content blocks"),
        ([5], "invalid_type", "content blocks such as"),
        ([{"type": "image"}], "unsupported_value", "'image'"),
    ],
)
def test_other_content_is_refused(content: Any, kind: str, text: str) -> None:
    found = refusal(messages=[{"role": "user", "content": content}])
    assert found[0] == kind
    assert text in found[1]


def test_the_system_prompt_holds_text_alone() -> None:
    assert refusal(system=[{"type": "tool_use"}])[0] == "unsupported_value"


def test_the_result_of_a_call_may_be_empty() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": []}
    assert body(messages=[{"role": "user", "content": [result]}]).messages[0].content[0].content == []


def test_tools_that_run_elsewhere_are_named() -> None:
    kind, text = refusal(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert kind == "unsupported_value"
    assert "web_search_20250305" in text
    assert body(tools=[{"name": "add", "input_schema": {"type": "object"}}]).tools


def test_stop_sequences_are_bounded() -> None:
    assert body(stop_sequences=["x"]).stop_sequences == ["x"]
    assert refusal(stop_sequences=["x"] * 17)[0] == "too_long"
    assert refusal(stop_sequences=[""])[0] == "string_too_short"
