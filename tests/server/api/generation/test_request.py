"""Bodies are strict: types are not converted, numbers are bounded, and prompts have one form."""

from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from server.api.generation.request import MAX_LOGIT_BIAS_ENTRIES, ChoicesRequest, check_prompts


def problem(**fields: Any) -> dict[str, Any]:
    with pytest.raises(ValidationError) as refused:
        ChoicesRequest.model_validate(fields)
    found = refused.value.errors(include_url=False)
    return {"type": found[0]["type"], "loc": found[0]["loc"]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", True),
        ("n", 2.0),
        ("max_tokens", "5"),
        ("temperature", "1"),
        ("temperature", 2.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("seed", 2**63),
        ("min_tokens", -1),
        ("presence_penalty", 2.5),
        ("repetition_penalty", 0.0),
        ("timeout", 0),
        ("cache_salt", ""),
        ("allowed_token_ids", []),
        ("stop_token_ids", [-1]),
        ("prompt_logprobs", 21),
    ],
)
def test_what_is_not_of_its_type_or_out_of_bounds_is_refused_by_name(field: str, value: Any) -> None:
    assert problem(**{field: value})["loc"][0] == field


def test_null_is_not_taken_for_a_number_and_unknown_fields_are_seen() -> None:
    assert ChoicesRequest.model_validate({"n": None}).n is None
    assert problem(temprature=1.0) == {"type": "extra_forbidden", "loc": ("temprature",)}


def test_a_stop_string_may_stand_alone() -> None:
    assert ChoicesRequest.model_validate({"stop": "x"}).stop == ["x"]
    assert ChoicesRequest.model_validate({"stop": ["x", "y"]}).stop == ["x", "y"]
    assert problem(stop=["a"] * 5)["type"] == "too_long"
    assert problem(stop="")["type"] == "string_too_short"


@pytest.mark.parametrize("key", ["01", "-1", "1.0", "a", "", "9" * 10, "٣"])
def test_keys_of_logit_bias_are_token_ids(key: str) -> None:
    assert ChoicesRequest.model_validate({"logit_bias": {"0": 1.0, "12": -100}}).logit_bias
    assert problem(logit_bias={key: 1.0})["type"] == "invalid_value"


def test_entries_of_logit_bias_are_counted() -> None:
    entries = {str(token_id): 1.0 for token_id in range(MAX_LOGIT_BIAS_ENTRIES + 1)}
    assert problem(logit_bias=entries)["type"] == "object_above_max_properties"


def test_zero_tokens_of_a_prompt_cannot_be_kept() -> None:
    assert ChoicesRequest.model_validate({"truncate_prompt_tokens": -1}).truncate_prompt_tokens == -1
    assert problem(truncate_prompt_tokens=0)["type"] == "integer_below_min_value"


@pytest.mark.parametrize("value", ["text", "", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_a_prompt_has_one_of_four_forms(value: Any) -> None:
    assert check_prompts(value, 2) == value


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (5, "invalid_type"),
        ([], "empty_array"),
        ([[1], []], "empty_array"),
        (["a", 1], "invalid_type"),
        ([1, "a"], "invalid_type"),
        ([1, True], "invalid_type"),
        ([1, 2.0], "invalid_type"),
        ([[1], 2], "invalid_type"),
        ([[1], [2.0]], "invalid_type"),
        (["a", "b", "c"], "array_above_max_length"),
        ("\ud800", "invalid_value"),
        (["a", "\ud800"], "invalid_value"),
    ],
)
def test_a_prompt_of_no_form_is_refused(value: Any, kind: str) -> None:
    with pytest.raises(PydanticCustomError) as refused:
        check_prompts(value, 2)
    assert refused.value.type == kind


def test_one_prompt_of_many_ids_is_one_prompt() -> None:
    assert check_prompts(list(range(100)), 1) == list(range(100))
