"""Turns of the Messages API to messages of chat completions: calls stand in blocks of the assistant's turns
there, their results in blocks of the user's. Every fault is an ApiError that names the block."""

from typing import Any

from server.api.generation.chat_messages import MAX_MESSAGES
from server.api.messages.request import ContentBlock, CountTokensRequest, InputMessage
from server.errors import invalid_value, missing_parameter
from server.http.json_response import encode_json

# Which kinds of blocks a turn may hold, beside text.
_KINDS = {"user": "tool_result", "assistant": "tool_use"}


def chat_messages(body: CountTokensRequest) -> tuple[list[dict[str, Any]], list[str]]:
    """(messages, the fields that they come from)"""
    messages: list[dict[str, Any]] = []
    names: list[str] = []
    if body.system is not None:
        messages.append({"role": "system", "content": [_part(block.text) for block in body.system]})
        names.append("system")
    last = len(body.messages) - 1
    for index, message in enumerate(body.messages):
        name = f"messages[{index}]"
        if message.role == "assistant":
            turns = [_assistant_turn(message, f"{name}.content", is_last=index == last)]
        else:
            turns = _user_turn(message, f"{name}.content")
        messages += turns
        names += [name] * len(turns)
    if len(messages) > MAX_MESSAGES:
        reason = f"expected at most {MAX_MESSAGES} turns and results of calls, got {len(messages)}"
        raise invalid_value("messages", reason, code="array_above_max_length")
    return messages, names


def _assistant_turn(message: InputMessage, name: str, *, is_last: bool) -> dict[str, Any]:
    texts, calls = [], []
    for position, block in enumerate(message.content):
        place = f"{name}[{position}]"
        _check_kind(message.role, block, place)
        if block.type == "text":
            texts.append(_part(_given(block.text, f"{place}.text")))
        else:
            if is_last:
                reason = (
                    "an answer that has made a call can't be continued; send the result of the call after it"
                )
                raise invalid_value(place, reason)
            arguments = encode_json(_given(block.input, f"{place}.input")).decode()
            function = {"name": _given(block.name, f"{place}.name"), "arguments": arguments}
            calls.append({"id": _given(block.id, f"{place}.id"), "type": "function", "function": function})
    turn: dict[str, Any] = {"role": "assistant", "content": texts or None}
    return {**turn, "tool_calls": calls} if calls else turn


def _user_turn(message: InputMessage, name: str) -> list[dict[str, Any]]:
    """Each result is a message of its own; texts that follow each other are one."""
    turns: list[dict[str, Any]] = []
    for position, block in enumerate(message.content):
        place = f"{name}[{position}]"
        _check_kind(message.role, block, place)
        if block.type == "tool_result":
            call_id = _given(block.tool_use_id, f"{place}.tool_use_id")
            text = "".join(part.text for part in block.content or ())
            shown = f"The call failed: {text}" if block.is_error else text
            turns.append({"role": "tool", "tool_call_id": call_id, "content": [_part(shown)]})
            continue
        part = _part(_given(block.text, f"{place}.text"))
        if turns and turns[-1]["role"] == message.role:
            turns[-1]["content"].append(part)
        else:
            turns.append({"role": message.role, "content": [part]})
    return turns


def _check_kind(role: str, block: ContentBlock, place: str) -> None:
    if block.type not in ("text", _KINDS.get(role)):
        owner = next(owner for owner, kind in _KINDS.items() if kind == block.type)
        reason = f"only a message of role '{owner}' has blocks of type '{block.type}'"
        raise invalid_value(f"{place}.type", reason)


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _given(value: Any, param: str) -> Any:
    if value is None:
        raise missing_parameter(param)
    return value
