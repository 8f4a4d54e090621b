"""Items become turns: calls join the message that they stand behind, and a missing field is named."""

from typing import Any

import pytest

from server.api.responses.input import item_messages, response_conversation, response_functions
from server.api.responses.request import ResponseRequest
from server.errors import ApiError

CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
USER = {"role": "user", "content": "a"}


def body(*items: dict[str, Any], **fields: Any) -> ResponseRequest:
    return ResponseRequest.model_validate({"input": list(items), **fields})


def test_calls_behind_a_message_are_one_turn() -> None:
    assistant = {"role": "assistant", "content": "b"}
    result = {"type": "function_call_output", "call_id": "c", "output": "3"}
    messages, names = item_messages(body(USER, assistant, CALL, CALL, result).input)
    assert [(message.role, len(message.calls)) for message in messages] == [
        ("user", 0),
        ("assistant", 2),
        ("tool", 0),
    ]
    assert names == ["input[0]", "input[1]", "input[4]"]
    assert messages[2].call_id == "c"


def test_instructions_go_in_front() -> None:
    conversation = response_conversation(body(USER, instructions="be brief"), ())
    assert [message.role for message in conversation.messages] == ["system", "user"]
    assert conversation.names == ["instructions", "input[0]"]


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"content": "a"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({**CALL, "name": None}, "input[1].name"),
        ({**CALL, "arguments": None}, "input[1].arguments"),
        ({**CALL, "call_id": None}, "input[1].call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "input[1].output"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "input[1].content[0].refusal"),
    ],
)
def test_what_a_kind_needs_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        item_messages(body(USER, item).input)
    assert (refused.value.param, refused.value.code) == (param, "missing_required_parameter")


def test_functions_name_the_field_of_their_schema() -> None:
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    (function,) = response_functions(body(USER, tools=tools).tools)
    assert (function.name, function.param) == ("add", "tools[0].parameters")
