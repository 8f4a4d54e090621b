"""Functions that a model may call, as text of a chat. Gemma 3 has no tokens for them: it is told in the
prompt which functions there are and how to write a call, in the form that Google describes for it (JSON with
``name`` and ``parameters``); a result comes back in the next user turn, in a block marked ``tool_output``.
``call_parser`` reads what is written here."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_BACKTICKS = re.compile("`+")


@dataclass(frozen=True, slots=True)
class Function:
    """A function as the client describes it. ``parameters`` is the JSON schema of its arguments, None without
    any; ``param`` is the request field of the schema."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    param: str

    @property
    def schema(self) -> dict[str, Any]:
        """The schema that arguments follow: always an object."""
        return _NO_PARAMETERS if self.parameters is None else {**self.parameters, "type": "object"}


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call in an earlier turn; ``arguments`` is the text of a JSON object, or whatever a model wrote for
    one."""

    call_id: str
    name: str
    arguments: str


def functions_text(functions: Iterable[Function]) -> str:
    """What the prompt says about them. Nothing in it depends on whether a call is wanted, so that requests
    share their prefix."""
    listed = []
    for function in functions:
        shown: dict[str, Any] = {"name": function.name}
        if function.description:
            shown["description"] = function.description
        shown["parameters"] = function.schema if function.parameters is None else function.parameters
        listed.append(json.dumps(shown, ensure_ascii=False))
    joined = ",\n".join(listed)
    return (
        "You have access to the functions listed below. To call one, you must answer with a JSON object "
        'of this form and no other text:\n{"name": function name, "parameters": '
        "object with the arguments by name}\n"
        "To call several at once, answer with a JSON list of such objects. "
        "Where no function helps, answer in plain text.\n"
        f"The functions, each with the JSON schema of its parameters:\n[\n{joined}\n]"
    )


def call_head(name: str) -> str:
    """A call up to its arguments, as constrained answers and earlier turns write it."""
    return f'{{"name":{json.dumps(name)},"parameters":'


def calls_text(calls: Sequence[FunctionCall]) -> str:
    """Calls of an earlier turn, as the model writes them."""
    texts = [f"{call_head(call.name)}{call.arguments.strip() or '{}'}}}" for call in calls]
    return texts[0] if len(texts) == 1 else f"[{','.join(texts)}]"


def result_text(name: str | None, text: str) -> str:
    """The result of a call. No text of it can end the block early."""
    fence = "`" * max(3, 1 + max(map(len, _BACKTICKS.findall(text)), default=0))
    return f"Result of {name or 'a function'}:\n{fence}tool_output\n{text}\n{fence}"
