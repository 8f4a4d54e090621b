"""Bodies of /v1/responses: text is one message, items have a kind each, and what needs a store is refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from server.api.responses.request import ResponseRequest


def body(given: Any = "hi", **fields: Any) -> ResponseRequest:
    return ResponseRequest.model_validate({"input": given, **fields})


def refusal(given: Any) -> tuple[str, str]:
    with pytest.raises(ValidationError) as refused:
        body(given)
    first = refused.value.errors(include_url=False)[0]
    return first["type"], first["msg"]


def test_text_is_one_message_of_the_user() -> None:
    (item,) = body("hi").input
    assert (item.type, item.role) == ("message", "user")
    assert item.content is not None
    assert [(part.type, part.text) for part in item.content] == [("input_text", "hi")]


def test_an_item_without_a_type_is_a_message() -> None:
    assert [item.type for item in body([{"role": "user", "content": "a"}]).input] == ["message"]


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ([], "empty_array", "at least one item"),
        (5, "invalid_type", "a string or a list of items"),
        ([5], "invalid_type", "an item such as"),
        ([{"type": "item_reference", "id": "x"}], "unsupported_value", "'item_reference'"),
        ([{"type": 5}], "invalid_type", "as a string"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "unsupported_value", "'input_image'"),
        ([{"role": "user", "content": [5]}], "invalid_type", "content parts such as"),
    ],
)
def test_other_input_is_refused(given: Any, kind: str, text: str) -> None:
    found = refusal(given)
    assert found[0] == kind
    assert text in found[1]


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    assert not body().shows_logprobs
    assert body(top_logprobs=2).shows_logprobs
    assert body(include=["message.output_text.logprobs"]).shows_logprobs
    assert not body(include=["reasoning.encrypted_content"]).shows_logprobs
