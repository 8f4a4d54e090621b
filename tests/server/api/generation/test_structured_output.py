"""The one constraint of a request, from whichever of its spellings is given."""

from typing import Any

import pytest

from server.api.completions.request import CompletionRequest
from server.api.generation.structured_output import choices_constraint
from server.errors import ApiError

SCHEMA = {"type": "object"}


def constraint(**fields: Any) -> Any:
    return choices_constraint(CompletionRequest.model_validate({"prompt": "a", **fields}))


@pytest.mark.parametrize(
    ("fields", "kind", "value", "param"),
    [
        ({"guided_json": SCHEMA}, "json", SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, "regex", "a+", "guided_regex"),
        ({"guided_choice": ["a", "b"]}, "choice", ("a", "b"), "guided_choice"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+", "structured_outputs.regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "json",
            SCHEMA,
            "response_format.json_schema.schema",
        ),
    ],
)
def test_every_spelling(fields: dict[str, Any], kind: str, value: Any, param: str) -> None:
    source = constraint(**fields)
    assert (source.kind, source.value, source.param) == (kind, value, param)


def test_text_is_no_constraint() -> None:
    assert constraint() is None
    assert constraint(response_format={"type": "text"}) is None


def test_two_constraints_are_refused_and_both_named() -> None:
    with pytest.raises(ApiError, match="'response_format' is given too") as refused:
        constraint(response_format={"type": "json_object"}, guided_regex="a")
    assert refused.value.param == "guided_regex"


def test_a_constraint_without_its_schema_is_missing_it() -> None:
    with pytest.raises(ApiError) as refused:
        constraint(response_format={"type": "json_schema"})
    assert (refused.value.param, refused.value.code) == (
        "response_format.json_schema",
        "missing_required_parameter",
    )
    with pytest.raises(ApiError, match="expected one of json") as refused:
        constraint(structured_outputs={})
    assert refused.value.param == "structured_outputs"
