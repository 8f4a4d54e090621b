"""Prompts as lists, and messages of chats whose fields go with their role."""

from typing import Any

import pytest

from server.api.generation.chat_messages import Message
from server.api.generation.prompts import chat_conversation, check_token_ids, encode_prompt, prompt_list
from server.errors import ApiError
from tests.server.text.small_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_every_form_of_a_prompt_is_a_list_of_prompts(prompt: Any, expected: Any) -> None:
    assert list(prompt_list(prompt)) == expected


def test_ids_without_a_token_are_refused() -> None:
    check_token_ids(TOKENIZER, [0, TOKENIZER.num_tokens - 1], "prompt")
    with pytest.raises(ApiError, match=f"token ids are 0 to {TOKENIZER.num_tokens - 1}") as refused:
        check_token_ids(TOKENIZER, [TOKENIZER.num_tokens], "prompt")
    assert refused.value.param == "prompt"


def test_text_gets_one_beginning_and_ids_are_used_as_they_are() -> None:
    text = encode_prompt(TOKENIZER, "ab", limit=None, wants_text=True, skip_special_tokens=True)
    assert text.token_ids[0] == TOKENIZER.bos_token_id
    assert text.text == "ab"
    ids = encode_prompt(TOKENIZER, text.token_ids[1:], limit=None, wants_text=True, skip_special_tokens=True)
    assert ids.token_ids == text.token_ids[1:]
    assert ids.text == "ab"


@pytest.mark.parametrize(
    ("message", "param", "code"),
    [
        ({"role": "tool", "content": "1"}, "messages[0].tool_call_id", "missing_required_parameter"),
        ({"role": "user", "content": "1", "tool_call_id": "x"}, "messages[0].tool_call_id", "invalid_value"),
        ({"role": "user"}, "messages[0].content", "invalid_type"),
    ],
)
def test_fields_go_with_the_role(message: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_conversation([Message.model_validate(message)])
    assert (refused.value.param, refused.value.code) == (param, code)
