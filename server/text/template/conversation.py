"""Messages of a chat, and how they are brought into the order Gemma 3 was trained on: at most one system
message, then turns that alternate. Calls of functions and their results have no place of their own there:
they become text of the turns. Everything a user can cause is a ChatTemplateError that names the field."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from server.text.tool_calls.functions import FunctionCall, calls_text, result_text

_SYSTEM_ROLES = frozenset({"system", "developer"})
_TURN_ROLES = frozenset({"user", "assistant"})
_KNOWN_ROLES = "system, developer, user, assistant, tool"


class ChatTemplateError(Exception):
    """Messages or a template that give no prompt; the text is fit for the client. `param` names the request
    field."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class ChatMessage:
    """One turn. `content` is the text, or the texts of the parts of a multi-part message in their order.
    `calls` are an assistant's, `call_id` says which of them a message of role "tool" is the result of."""

    role: str
    content: str | tuple[str, ...]
    calls: tuple[FunctionCall, ...] = ()
    call_id: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(self.content)


def merge_messages(
    messages: Sequence[ChatMessage],
    strict: bool = False,
    *,
    names: Sequence[str] | None = None,
    instructions: str = "",
) -> list[ChatMessage]:
    """Returns at most one system message, then turns that alternate and begin with the user.

    System messages ("developer" is the same role) are joined with a blank line, wherever they stand, and so
    are consecutive turns of one role; results of calls are the user's. A system message without any turn
    becomes a user turn. A conversation that begins with the assistant is an error: no turn is invented. With
    `strict`, nothing is joined or moved: what would need it is an error; the results of one turn's calls
    belong together all the same. `names` are the request fields of the messages, several of which may come
    from one; `instructions` is the server's own end of the system message.
    """
    if not messages:
        raise ChatTemplateError("messages must hold at least one message.")
    names = [f"messages[{index}]" for index in range(len(messages))] if names is None else names
    system_texts: list[str] = []
    # joined at the end: one by one, long turns would be copied for each of their messages
    turns: list[list[ChatMessage]] = []
    called: dict[str, str] = {}
    last_role = last_name = ""
    for index in _in_order_of_calls(messages):
        message, name = messages[index], names[index]
        role = message.role
        if role in _SYSTEM_ROLES:
            if strict and index > 0:
                raise _role_error(
                    role, name, "with strict roles only the first message may be a system message"
                )
            system_texts.append(message.text)
            continue
        if role == "tool":
            follows = last_role == "tool" or (last_role == "assistant" and bool(called))
            if strict and not (follows and message.call_id in called):
                raise _role_error(
                    role,
                    name,
                    "with strict roles it must follow the assistant's call that it is the result of",
                )
            turn = ChatMessage("user", result_text(called.get(message.call_id or ""), message.text))
        elif role in _TURN_ROLES:
            turn = message
            if message.calls:
                called.update((call.call_id, call.name) for call in message.calls)
                turn = ChatMessage(role, _join([message.text, calls_text(message.calls)], "\n"))
        else:
            raise _role_error(role, name, f"this is not a known role; use one of {_KNOWN_ROLES}")
        if not turns and turn.role == "assistant":
            raise _role_error(role, name, "the conversation must begin with a user message")
        if turns and turns[-1][0].role == turn.role:
            if strict and name != last_name and not (role == last_role == "tool"):
                raise _role_error(
                    role, name, "with strict roles the turns must alternate between user and assistant"
                )
            turns[-1].append(turn)
        else:
            turns.append([turn])
        last_role, last_name = role, name
    if not turns and strict:
        raise ChatTemplateError(
            "messages holds no user message: with strict roles a system message alone is refused."
        )
    system_text = _join([*system_texts, instructions])
    if not turns:
        return [ChatMessage("user", system_text)]
    joined = [
        turn[0] if len(turn) == 1 else ChatMessage(turn[0].role, _join(part.text for part in turn))
        for turn in turns
    ]
    return [ChatMessage("system", system_text), *joined] if system_text else joined


def _in_order_of_calls(messages: Sequence[ChatMessage]) -> list[int]:
    """Indices of the messages; results that follow each other stand in the order of their calls, by which a
    model tells two calls of one function apart."""
    order: list[int] = []
    positions: dict[str, int] = {}  # of the latest call with the id: some clients count from 0 in every turn
    count = itertools.count()
    results: list[int] = []

    def place_results() -> None:
        order.extend(
            sorted(results, key=lambda index: positions.get(messages[index].call_id or "", len(positions)))
        )
        results.clear()

    for index, message in enumerate(messages):
        if message.role == "tool":
            results.append(index)
            continue
        place_results()
        order.append(index)
        for call in message.calls:
            positions[call.call_id] = next(count)
    place_results()
    return order


def _role_error(role: str, name: str, reason: str) -> ChatTemplateError:
    param = f"{name}.role"
    return ChatTemplateError(f"{param} is {role[:64]!r}: {reason}.", param)


def _join(texts: Iterable[str], separator: str = "\n\n") -> str:
    return separator.join(text for text in texts if text)
