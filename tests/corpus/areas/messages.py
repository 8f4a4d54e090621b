"""/v1/messages and /v1/messages/count_tokens, Anthropic's API: the same chats in another form, and what is
refused."""

from typing import Any

from tests.corpus.areas.structured_output import PERSON
from tests.corpus.areas.tools import SCHEMA, SCRIPTS, repeated
from tests.corpus.exchange import Exchange, both_ways, post

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO = [{"role": "user", "content": "Name a city."}]
OFFERED = [
    {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA},
    {"name": "get_time", "input_schema": {"type": "object", "properties": None}},
]
USED = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}]}
HISTORY = [
    *HELLO,
    {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, USED]},
    {"role": "user", "content": [{**RESULT, "is_error": True}, {"type": "text", "text": "And now?"}]},
]


def create(name: str, **fields: Any) -> Exchange:
    return post(PATH, name, {"messages": HELLO, "max_tokens": 12, "temperature": 0, **fields})


def free(name: str, script: str, **fields: Any) -> Exchange:
    """The model is free to call, and is likely to write a script."""
    turns = repeated(SCRIPTS[script])
    return create(f"free: {name}", messages=turns, **{"max_tokens": 60, "tools": OFFERED, **fields})


def constant(text: str) -> dict[str, Any]:
    """The model says this text, in quotes."""
    return {"format": {"type": "json_schema", "schema": {"const": text}}}


def exchanges() -> list[Exchange]:
    blocks = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief."},
    ]
    call = {"temperature": 1, "tools": OFFERED, "max_tokens": 100}
    return [
        *both_ways(
            create("greedy"),
            create("a system prompt", system="Be brief."),
            create(
                "blocks",
                system=blocks,
                messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            ),
            create(
                "the beginning of the answer",
                messages=[*HELLO, {"role": "assistant", "content": "The city is"}],
            ),
            create("drawn", temperature=1, seed=1, top_k=40, top_p=0.9, max_tokens=20),
            create("the defaults of the server", temperature=None, seed=2),
            create("nothing to generate", max_tokens=0),
            create(
                "a stop sequence",
                output_config=constant("one two three"),
                stop_sequences=["x", " three"],
                max_tokens=40,
            ),
            create("the end of its turn", output_config=constant("yes"), max_tokens=40),
            create(
                "a JSON schema",
                output_config={"format": {"type": "json_schema", "schema": PERSON}},
                max_tokens=120,
            ),
            create("any function", tool_choice={"type": "any"}, seed=3, **call),
            create(
                "one function", tool_choice={"type": "any", "disable_parallel_tool_use": True}, seed=4, **call
            ),
            create("a named function", tool_choice={"type": "tool", "name": "get_weather"}, seed=5, **call),
            create("a call that is cut", tool_choice={"type": "any"}, seed=5, **{**call, "max_tokens": 14}),
            *(free(script, script) for script in SCRIPTS),
            free("cut by length", "a call", max_tokens=12),
            free("cut by a stop sequence", "a call", stop_sequences=['"days"']),
            free(
                "one call only",
                "two calls behind a text",
                tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            ),
            create(
                "a text that is constrained, free to call",
                output_config=constant(SCRIPTS["a call"]),
                seed=7,
                **call,
            ),
            create("no function", tools=OFFERED, tool_choice={"type": "none"}),
            create("results of calls", messages=HISTORY, tools=OFFERED),
            create(
                "thinking",
                thinking={"type": "disabled"},
                metadata={"user_id": "u"},
                service_tier="auto",
                moon=1,
            ),
        ),
        create("the same again, from the cache", system="Be brief. " * 12, max_tokens=2),
        create("the same once more, from the cache", system="Be brief. " * 12, max_tokens=2),
        post(
            PATH,
            "headers of Anthropic's clients",
            {"messages": HELLO, "max_tokens": 2, "temperature": 0},
            {
                "anthropic-version": "2023-06-01",
                "anthropic-beta": "x",
                "x-api-key": "any",
                "x-request-id": "mine",
            },
        ),
        post(COUNT, "count: a message", {"messages": HELLO}),
        post(
            COUNT,
            "count: a system prompt and functions",
            {"messages": HISTORY, "system": "Brief.", "tools": OFFERED},
        ),
        post(COUNT, "count: the rest of a request", {"messages": HELLO, "max_tokens": 5, "stream": True}),
    ]


REFUSED: dict[str, dict[str, Any]] = {
    "no messages": {"messages": None},
    "an empty list": {"messages": []},
    "no blocks": {"messages": [{"role": "user", "content": []}]},
    "an unknown role": {"messages": [{"role": "tool", "content": "x"}]},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "a call of the user": {"messages": [{"role": "user", "content": [USED]}]},
    "a call at the end": {"messages": [*HELLO, {"role": "assistant", "content": [USED]}]},
    "a result without its call": {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
    "a function without a schema": {"tools": [{"name": "f"}]},
    "a name with a blank": {"tools": [{"name": "f g", "input_schema": {}}]},
    "a schema of a text": {"tools": [{"name": "f", "input_schema": {"type": "string"}}]},
    "a wrong schema": {
        "tools": [OFFERED[0], {"name": "f", "input_schema": {"properties": {"a": {"type": "no"}}}}]
    },
    "two functions of one name": {"tools": [OFFERED[0], OFFERED[0]]},
    "a tool of the server": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "a choice without functions": {"tool_choice": {"type": "any"}},
    "a choice without a name": {"tools": OFFERED, "tool_choice": {"type": "tool"}},
    "an unknown choice": {"tools": OFFERED, "tool_choice": {"type": "tool", "name": "g"}},
    "another model": {"model": "claude"},
}


def refused() -> list[Exchange]:
    found = []
    for name, fields in REFUSED.items():
        body = {"messages": HELLO, **fields}
        found += [create(name, **fields), post(COUNT, f"count: {name}", body)]
    return [
        *found,
        create("no max_tokens", max_tokens=None),
        create("an empty stop sequence", stop_sequences=[""]),
        create("thinking that it cannot", thinking={"type": "enabled", "budget_tokens": 100}),
        create("a temperature too high, streamed", temperature=3, stream=True),
        create("a long prompt", messages=[{"role": "user", "content": "word " * 3000}]),
        post(PATH, "another content type", b"{}", {"content-type": "text/plain"}),
    ]
