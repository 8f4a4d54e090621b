"""A body that is no sound request is an error that names the field, its place and what was expected."""

from typing import Any

import pytest

from server.api.chat.request import ChatCompletionRequest
from server.api.completions.request import CompletionRequest
from server.api.generation.validation import parse_request
from server.errors import ApiError


def parsed(strict: bool = False, **fields: Any) -> Any:
    return parse_request(CompletionRequest, {"prompt": "a", **fields}, strict_params=strict)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": 3}, "temperature", "decimal_above_max_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"stop": ["a"] * 200}, "stop", "array_above_max_length"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "empty_array"),
    ],
)
def test_a_wrong_value_names_field_and_code(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(**fields)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert f"'{param}'" in refused.value.message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match="Missing required parameter: 'prompt'") as refused:
        parse_request(CompletionRequest, {}, strict_params=False)
    assert refused.value.code == "missing_required_parameter"


def test_several_faults_are_told_at_once_the_first_decides() -> None:
    with pytest.raises(ApiError, match="Also invalid: 'n'") as refused:
        parsed(temperature=9, n=0)
    assert refused.value.param == "temperature"


def test_the_place_within_a_list_is_told() -> None:
    with pytest.raises(ApiError) as refused:
        parse_request(
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": 5}]},
            strict_params=False,
        )
    assert str(refused.value.param).startswith("messages[1].content")


def test_unknown_fields_are_ignored_and_named_or_refused() -> None:
    assert parsed(colour="red").headers() == {"x-gemserve-ignored-parameters": "colour"}
    with pytest.raises(ApiError, match="Unknown parameter: 'colour'") as refused:
        parsed(strict=True, colour="red")
    assert refused.value.code == "unknown_parameter"


def test_null_is_the_same_as_absent() -> None:
    assert parsed(temperature=None, max_tokens=None).body == parsed().body
