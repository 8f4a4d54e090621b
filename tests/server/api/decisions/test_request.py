"""Bodies of /v1/decisions: a question has the options of its type, and long inputs are counted."""

from typing import Any

import pytest
from pydantic import ValidationError

from server.api.decisions.request import MAX_OPTION_CHARACTERS, DecisionRequest, num_characters

PREDICATE = {"type": "predicate", "instructions": "Is it?"}


def body(given: Any = "hi", *questions: dict[str, Any]) -> DecisionRequest:
    return DecisionRequest.model_validate({"input": given, "questions": list(questions) or [PREDICATE]})


def refusal(*questions: dict[str, Any]) -> tuple[str, str]:
    with pytest.raises(ValidationError) as refused:
        body("hi", *questions)
    first = refused.value.errors(include_url=False)[0]
    return first["type"], first["msg"]


def test_instructions_of_several_parts_are_joined() -> None:
    parts = [{"type": "input_text", "text": "Is it?"}, {"type": "input_json", "value": {"a": 1}}]
    with pytest.raises(ValidationError):
        body("hi", {**PREDICATE, "instructions": [{"type": "input_image"}]})
    assert (
        body("hi", {**PREDICATE, "instructions": parts[:1] * 2}).questions[0].instructions
        == "Is it?\n\nIs it?"
    )


@pytest.mark.parametrize(
    ("choices", "kind"),
    [
        ([{"value": "a"}], "too_short"),
        ([{"value": "a"}, {"value": "a"}], "invalid_value"),
        ([{"value": "a"}, {"value": 1}], "invalid_type"),
        ([{"value": "a"}, {"value": "x" * (MAX_OPTION_CHARACTERS + 1)}], "string_above_max_length"),
    ],
)
def test_choices_are_two_or_more_different_values(choices: list[Any], kind: str) -> None:
    assert refusal({"type": "choice", "instructions": "Which?", "choices": choices})[0] == kind


def test_a_text_and_a_boolean_written_like_it_are_two_values() -> None:
    choices = [{"value": True}, {"value": "true"}]
    asked = {"type": "choice", "instructions": "Which?", "choices": choices}
    assert [choice.value for choice in body("hi", asked).questions[0].choices or ()] == [True, "true"]


def test_items_count_as_characters_too() -> None:
    one = num_characters(body("hi").input)
    two = num_characters(body([{"role": "user", "content": "hi"}, {"role": "user", "content": ""}]).input)
    assert one > len("hi")
    assert two > one
