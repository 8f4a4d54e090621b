"""What the server says of its tokenizer, and which fields of /tokenize go together."""

from typing import Any

import pytest

from server.api.tokenize.request import TokenizeRequest
from server.api.tokenize.routes import _check_source, tokenizer_info
from server.errors import ApiError
from tests.server.text.small_tokenizer import build_tokenizer

MESSAGES = [{"role": "user", "content": "a"}]


def refusal(**fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(ApiError) as refused:
        _check_source(TokenizeRequest.model_validate(fields))
    return refused.value.param, refused.value.code


def test_tokens_that_the_vocabulary_lacks_are_null() -> None:
    info = tokenizer_info(build_tokenizer(), 64)
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == ("<bos>", "<eos>", "<pad>")
    assert (info["model_max_length"], info["add_bos_token"]) == (64, True)


def test_one_of_prompt_and_messages_is_needed() -> None:
    _check_source(TokenizeRequest.model_validate({"prompt": "a"}))
    _check_source(TokenizeRequest.model_validate({"messages": MESSAGES}))
    assert refusal() == ("prompt", "missing_required_parameter")


@pytest.mark.parametrize(
    "fields", [{"messages": MESSAGES}, {"add_generation_prompt": True}, {"continue_final_message": True}]
)
def test_fields_of_a_chat_do_not_go_with_a_prompt(fields: dict[str, Any]) -> None:
    assert refusal(prompt="a", **fields) == (next(iter(fields)), "invalid_value")
