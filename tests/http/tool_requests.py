"""What tests of tools send and read: functions, scripted texts with calls, and answers put together from
their streams."""

from typing import Any

from tests.http.live_server import LiveServer
from tests.http.test_streams import chunks_of
from tests.scripted import FAILS

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("get_weather", SCHEMA, description="The weather of a city."), tool("get_time")]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city":"Paris","days":2}'
CALL = f'{{"name":"get_weather","parameters":{ARGUMENTS}}}'
PAIR = f'Let me see.\n[{CALL}, {{"name": "get_time"}}]'
TEXTS = [
    CALL,
    "It is 10 o'clock.\n\n[1] {and} the sun shines: ```no```",
    PAIR,
    '{"name": "Bob", "parameters": {}}',
    f"```json\n{CALL}\n```\nDone.",
    "",
    f"So far{FAILS}",
    FAILS,
]
ONLY_CALL, PLAIN, TWO_CALLS, NO_CALL, FENCED, NOTHING, FAILING, FAILING_AT_ONCE = range(len(TEXTS))
RANDOM = 1000  # and beyond: seeds without a script


def ask(server: LiveServer, seed: int, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "tools": TOOLS, "seed": seed, "temperature": 1, "max_tokens": 300, **fields}
    choice: dict[str, Any] = server.chat(**body)["choices"][0]
    return choice


def streamed(
    server: LiveServer, seed: int, index: int = 0, **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the choice put together as a client does, its chunks)"""
    body = {"messages": MESSAGES, "tools": TOOLS, "seed": seed, "temperature": 1, "max_tokens": 300, **fields}
    chunks = [chunk["choices"][0] for chunk in chunks_of(server, CHAT, body) if chunk["choices"]]
    chunks = [choice for choice in chunks if choice["index"] == index]
    message: dict[str, Any] = {"content": None, "refusal": None}
    calls: list[dict[str, Any]] = []
    for delta in (choice["delta"] for choice in chunks):
        if delta.get("content") is not None:
            message["content"] = (message["content"] or "") + delta["content"]
        message |= {"role": delta["role"]} if "role" in delta else {}
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                assert piece["index"] == len(calls)
                assert piece["id"].startswith("call_")
                assert piece["type"] == "function"
                calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
            else:
                assert set(piece) == {"index", "function"}
                assert set(piece["function"]) == {"arguments"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": chunks[-1]["finish_reason"]}, chunks


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    message = dict(choice["message"])
    message["tool_calls"] = [call["function"] for call in message.get("tool_calls", ())]
    return {"message": message, "finish_reason": choice["finish_reason"]}


def called(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in choice["message"].get("tool_calls", ())
    ]


def described(server: LiveServer, name: str) -> dict[str, Any]:
    """A schema of /openapi.json, with what it refers to."""
    return {
        "$ref": f"#/components/schemas/{name}",
        "components": server.client.get("/openapi.json").json()["components"],
    }
