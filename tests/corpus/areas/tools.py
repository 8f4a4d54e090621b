"""Functions of chat completions: calls that the model must make, calls that are read from its text, and their
results."""

import json
from typing import Any

from tests.corpus.exchange import Exchange, both_ways, post

PATH = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [function("get_weather", SCHEMA, description="The weather of a city."), function("get_time")]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
FREE_TIME = {
    "type": "allowed_tools",
    "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "get_time"}}]},
}
ARGUMENTS = '{"city":"Paris","days":2}'
CALL = f'{{"name":"get_weather","parameters":{ARGUMENTS}}}'
SCRIPTS = {
    "a call": CALL,
    "two calls behind a text": f'Let me see.\n[{CALL}, {{"name": "get_time"}}]',
    "a call in a fence, and a text": f"```json\n{CALL}\n```\nDone.",
    "no call of a known function": '{"name": "Bob", "parameters": {}}',
    "brackets that are no call": "It is 10.\n\n[1] {and} the sun: ```no```",
}
HISTORY = [
    *ASKED,
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}},
            {"id": "c2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c2", "content": "10:00"},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
]


def ask(name: str, **fields: Any) -> Exchange:
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 100, "temperature": 1, "seed": 1, **fields}
    return post(PATH, name, body, is_interleaved=fields.get("n", 1) > 1)


def repeated(text: str) -> list[dict[str, str]]:
    """Turns whose answers are all this text. A model that writes text at all gives the same answer once more,
    and so calls functions of its own free will; one of random weights writes anything."""
    return [*ASKED, {"role": "assistant", "content": text}] * 3 + ASKED


def free(name: str, script: str, **fields: Any) -> Exchange:
    """The model is free to call, and is likely to write a script."""
    return ask(
        f"free: {name}", messages=repeated(SCRIPTS[script]), **{"max_tokens": 60, "temperature": 0, **fields}
    )


def exchanges() -> list[Exchange]:
    return [
        *both_ways(
            ask("required", tool_choice="required"),
            ask("required, one call", tool_choice="required", parallel_tool_calls=False, seed=2),
            ask("a named function", tool_choice=NAMED, seed=3),
            ask("allowed functions", tool_choice=ALLOWED, seed=4),
            ask("required, cut by length", tool_choice="required", max_tokens=14),
            ask(
                "required, greedy, with log-probabilities",
                tool_choice="required",
                temperature=0,
                logprobs=True,
                max_tokens=40,
            ),
            ask("required, two choices", tool_choice="required", n=2, seed=5, parallel_tool_calls=False),
            *(free(script, script) for script in SCRIPTS),
            free("one call only", "two calls behind a text", parallel_tool_calls=False),
            free("cut by length", "a call", max_tokens=12),
            free("cut by a stop text", "a call", stop=['"days"']),
            free(
                "token ids and log-probabilities",
                "two calls behind a text",
                return_token_ids=True,
                logprobs=True,
            ),
            free("only one function", "two calls behind a text", tool_choice=FREE_TIME),
            free("drawn, two choices", "two calls behind a text", temperature=0.5, n=2),
            free("no function", "a call", tool_choice="none"),
            ask("auto: a text or calls", guided_choice=["No.", CALL], max_tokens=100),
            ask("auto: an object or calls", response_format={"type": "json_object"}, max_tokens=30, seed=6),
            ask("auto: free text", max_tokens=20, seed=7),
            ask("results of calls", messages=HISTORY, max_tokens=10, temperature=0, return_token_ids=True),
        ),
        ask(
            "calls of earlier turns without tools", messages=HISTORY, tools=None, max_tokens=4, temperature=0
        ),
        ask(
            "a schema with no meaning that can be enforced",
            tools=[function("f", {"properties": {"a": {"not": {}}}})],
            max_tokens=3,
        ),
        ask(
            "an open turn with a call",
            messages=[*ASKED, {"role": "assistant", "content": "Well,"}],
            continue_final_message=True,
            guided_choice=[" then.\n" + CALL],
        ),
        ask(
            "strict and unknown fields",
            tools=[function("f", {"type": "object"}, strict=True, moon=1)],
            max_tokens=3,
        ),
        post(
            "/tokenize",
            "the prompt of functions",
            {"messages": HISTORY, "tools": TOOLS, "return_token_strs": True},
        ),
        post(
            "/tokenize",
            "the prompt of a choice",
            {"messages": ASKED, "tools": TOOLS, "add_generation_prompt": False},
        ),
        post(
            PATH,
            "half a character in a schema",
            json.dumps(
                {
                    "messages": ASKED,
                    "tools": [function("f", {"title": "\ud800"})],
                    "max_tokens": 2,
                    "temperature": 0,
                }
            ).encode(),
        ),
    ]
