"""What tests of /v1/responses send and read: answers, and streams whose framing is checked on the raw
bytes."""

import json
from typing import Any

from tests.http.live_server import LiveServer
from tests.http.tool_requests import TOOLS as CHAT_TOOLS

RESPONSES = "/v1/responses"
TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]


def respond(server: LiveServer, **body: Any) -> dict[str, Any]:
    response = server.post(RESPONSES, {"input": "Weather?", "temperature": 1, **body})
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    return result


def events_of(server: LiveServer, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream whose framing is checked on the raw bytes."""
    response = server.post(RESPONSES, {"input": "Weather?", "temperature": 1, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    blocks = response.content.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types in their order, runs of deltas as one."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]


def stable(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two answers of the same content."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in response["output"]
    ]
    usage = {name: value for name, value in response["usage"].items() if name != "input_tokens_details"}
    left = {
        name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")
    }
    return {**left, "output": items, "usage": usage}


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )
