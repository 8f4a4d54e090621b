"""/v1/responses: items in, items and typed events out, and what is refused."""

from typing import Any

from tests.corpus.areas.structured_output import PERSON
from tests.corpus.areas.tools import ARGUMENTS, SCRIPTS, repeated
from tests.corpus.areas.tools import TOOLS as CHAT_TOOLS
from tests.corpus.exchange import Exchange, both_ways, post

PATH = "/v1/responses"
TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
USER = {"role": "user", "content": "Weather?"}
CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": ARGUMENTS}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
ALLOWED = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "get_weather"}],
}
LOGPROBS = ["message.output_text.logprobs"]


def respond(name: str, **fields: Any) -> Exchange:
    return post(PATH, name, {"input": "Weather?", "max_output_tokens": 12, "temperature": 0, **fields})


def free(name: str, script: str, **fields: Any) -> Exchange:
    """The model is free to call, and is likely to write a script."""
    turns = repeated(SCRIPTS[script])
    return respond(f"free: {name}", input=turns, **{"max_output_tokens": 60, "tools": TOOLS, **fields})


def exchanges() -> list[Exchange]:
    parts = [{"type": "input_text", "text": "Wea"}, {"type": "input_text", "text": "ther?"}]
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Let me see."}],
    }
    history = [USER, said, CALL, RESULT, USER]
    return [
        *both_ways(
            respond("a text"),
            respond("instructions", instructions="Be brief."),
            respond("parts", input=[{"role": "user", "content": parts}]),
            respond(
                "a system's and a developer's message",
                input=[{"role": "developer", "content": "Brief."}, USER],
            ),
            respond("drawn", temperature=1, seed=1, top_p=0.9, top_k=50, max_output_tokens=20),
            respond("the defaults of the server", temperature=None, seed=2),
            respond("log-probabilities", include=LOGPROBS, top_logprobs=2, max_output_tokens=4),
            respond(
                "log-probabilities of what was drawn",
                top_logprobs=1,
                temperature=1,
                seed=3,
                max_output_tokens=4,
            ),
            respond("an empty answer", logit_bias={"106": 100}),
            respond("nothing to generate", max_output_tokens=0),
            respond("a stop text", guided_choice=["one two three"], stop=" three", max_output_tokens=40),
            respond("a JSON object", text={"format": {"type": "json_object"}}, temperature=1, seed=4),
            respond(
                "a JSON schema",
                text={"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}},
                temperature=1,
                seed=5,
                max_output_tokens=120,
            ),
            respond(
                "a call that must be made",
                tools=TOOLS,
                tool_choice="required",
                max_output_tokens=100,
                seed=6,
                temperature=1,
            ),
            respond(
                "a named function",
                tools=TOOLS,
                tool_choice={"type": "function", "name": "get_weather"},
                max_output_tokens=100,
                seed=7,
                temperature=1,
            ),
            respond(
                "allowed functions",
                tools=TOOLS,
                tool_choice=ALLOWED,
                parallel_tool_calls=False,
                max_output_tokens=100,
            ),
            respond(
                "a call that must be made, cut", tools=TOOLS, tool_choice="required", max_output_tokens=3
            ),
            *(free(script, script) for script in SCRIPTS),
            free("cut by length", "a call", max_output_tokens=12),
            free("log-probabilities", "two calls behind a text", include=LOGPROBS),
            free("no function", "a call", tool_choice="none"),
            respond("items of earlier turns", input=history, tools=TOOLS),
            respond(
                "what is repeated",
                metadata={"a": "b"},
                user="u",
                store=True,
                max_tool_calls=3,
                truncation="disabled",
            ),
        ),
        respond(
            "fields that mean off",
            background=False,
            reasoning={},
            text={},
            tools=[],
            tool_choice="auto",
            unheard_of=1,
        ),
        respond(
            "items with all their fields",
            input=[{"type": None, **USER, "status": None, "phase": None, "id": "x"}],
        ),
        respond("an item without parts", input=[{"role": "user", "content": []}]),
    ]


REFUSED: dict[str, dict[str, Any]] = {
    "no input": {"input": None},
    "no items": {"input": []},
    "a number": {"input": 5},
    "half a character": {"input": "\ud800"},
    "an item without a role": {"input": [{}]},
    "an unknown role": {"input": [{"role": "critic", "content": "x"}]},
    "an item without content": {"input": [{"role": "user"}]},
    "an image": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "a part without text": {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    "a reference": {"input": [{"type": "item_reference", "id": "x"}]},
    "a call without arguments": {"input": [USER, {"type": "function_call", "call_id": "c", "name": "f"}]},
    "a result without a call": {"input": [USER, {"type": "function_call_output", "output": "x"}]},
    "an assistant first": {"input": [{"role": "assistant", "content": "x"}]},
    "an earlier response": {"previous_response_id": "resp_1"},
    "a conversation": {"conversation": "conv_1"},
    "in the background": {"background": True},
    "reasoning": {"reasoning": {"effort": "high"}},
    "messages": {"messages": [USER]},
    "max_tokens": {"max_tokens": 5},
    "several choices": {"n": 2},
    "another truncation": {"truncation": "auto"},
    "an unknown include": {"include": ["x"]},
    "too many alternatives": {"top_logprobs": 21},
    "an unknown format": {"text": {"format": {"type": "xml"}}},
    "a format without its schema": {"text": {"format": {"type": "json_schema", "name": "a"}}},
    "a wrong schema": {
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "objekt"}}}
    },
    "another verbosity": {"text": {"verbosity": "high"}},
    "a search": {"tools": [{"type": "web_search"}]},
    "a function without a name": {"tools": [{"type": "function"}]},
    "two functions of one name": {"tools": [TOOLS[0], TOOLS[0]]},
    "an unknown function": {"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}},
    "a choice without functions": {"tool_choice": "required"},
    "options of a stream that is none": {"stream_options": {"include_obfuscation": False}},
    "another model": {"model": "other"},
    "a long input": {"input": "word " * 3000},
}


def refused() -> list[Exchange]:
    found = [respond(name, **fields) for name, fields in REFUSED.items()]
    return [*found, respond("a wrong value of a stream", stream=True, temperature=3)]
