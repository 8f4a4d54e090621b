"""Items of a response's input to the messages of a chat. An assistant's message and the calls behind it are
one turn, as the model wrote them. Every fault is an ApiError that names the item."""

from collections.abc import Sequence

from server.api.generation.prompts import Conversation
from server.api.responses.request import ResponseItem, ResponseRequest, ResponseTextPart, ResponseTool
from server.errors import missing_parameter
from server.text.template.conversation import ChatMessage
from server.text.tool_calls.functions import Function, FunctionCall


def response_functions(tools: Sequence[ResponseTool] | None) -> list[Function]:
    return [
        Function(tool.name, tool.description, tool.parameters, f"tools[{index}].parameters")
        for index, tool in enumerate(tools or ())
    ]


def response_conversation(body: ResponseRequest, functions: Sequence[Function]) -> Conversation:
    messages, names = item_messages(body.input)
    if body.instructions:
        messages, names = [ChatMessage("system", body.instructions), *messages], ["instructions", *names]
    return Conversation(messages, names, functions)


def item_messages(items: Sequence[ResponseItem]) -> tuple[list[ChatMessage], list[str]]:
    """(messages, the fields that they come from)"""
    messages: list[ChatMessage] = []
    names: list[str] = []
    for index, item in enumerate(items):
        name = f"input[{index}]"
        message = _message(item, name)
        if messages and message.role == "assistant" and _belongs_to(message, messages[-1]):
            begun = messages[-1]
            messages[-1] = ChatMessage("assistant", begun.content, begun.calls + message.calls)
            continue
        messages.append(message)
        names.append(name)
    return messages, names


def _belongs_to(message: ChatMessage, previous: ChatMessage) -> bool:
    """A call behind an assistant's message or another call."""
    return previous.role == "assistant" and bool(message.calls)


def _message(item: ResponseItem, name: str) -> ChatMessage:
    match item.type:
        case "function_call":
            call_id = _given(item.call_id, f"{name}.call_id")
            call = FunctionCall(
                call_id, _given(item.name, f"{name}.name"), _given(item.arguments, f"{name}.arguments")
            )
            return ChatMessage("assistant", "", (call,))
        case "function_call_output":
            call_id = _given(item.call_id, f"{name}.call_id")
            if item.output is None:
                raise missing_parameter(f"{name}.output")
            return ChatMessage("tool", _text(item.output, f"{name}.output"), call_id=call_id)
        case "message":
            role = _given(item.role, f"{name}.role")
            if item.content is None:
                raise missing_parameter(f"{name}.content")
            return ChatMessage(role, _text(item.content, f"{name}.content"))


def _text(parts: Sequence[ResponseTextPart], name: str) -> str | tuple[str, ...]:
    texts = []
    for index, part in enumerate(parts):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None:
            raise missing_parameter(f"{name}[{index}].{'refusal' if part.type == 'refusal' else 'text'}")
        texts.append(text)
    return texts[0] if len(texts) == 1 else tuple(texts)


def _given(value: str | None, param: str) -> str:
    if value is None:
        raise missing_parameter(param)
    return value
