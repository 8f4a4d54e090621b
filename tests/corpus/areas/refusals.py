"""Fields of completions and chats that are refused: wrong types, values out of range, what is not supported,
and what does not fit the model."""

from typing import Any

from tests.corpus.areas.chats import HELLO, chat
from tests.corpus.areas.completions import complete
from tests.corpus.areas.tools import ASKED, NAMED, function
from tests.corpus.exchange import Exchange, post

HUGE = 10**30
VALUES: tuple[tuple[str, Any], ...] = (
    ("prompt", None),
    ("prompt", 5),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", ["a", 5]),
    ("prompt", [2, True]),
    ("prompt", [2, 10**6]),
    ("prompt", [[2], [-1]]),
    ("prompt", "\ud800"),
    ("prompt", ["a"] * 1025),
    ("temperature", -0.1),
    ("temperature", 2.01),
    ("temperature", "0.7"),
    ("temperature", True),
    ("top_p", 1.1),
    ("top_k", -2),
    ("min_p", -1),
    ("seed", 2**63),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", ["a", "b", "c", "d", "e"]),
    ("stop", "x" * 1001),
    ("stop", [1]),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("max_tokens", HUGE),
    ("min_tokens", 13),
    ("n", 0),
    ("n", 129),
    ("best_of", 21),
    ("best_of", 0),
    ("logprobs", 21),
    ("logprobs", True),
    ("prompt_logprobs", 21),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [10**6]),
    ("allowed_token_ids", [511]),
    ("logprob_token_ids", [5]),
    ("logit_bias", {"1000000": 1}),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {str(number): 1 for number in range(1025)}),
    ("stop_token_ids", [10**6]),
    ("cache_salt", ""),
    ("cache_salt", "\ud800"),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("truncate_prompt_tokens", 0),
    ("return_token_ids", 1),
    ("skip_special_tokens", "no"),
    ("stream", "yes"),
    ("stream_options", {}),
    ("timeout", 0),
    ("priority", 1),
    ("suffix", "x"),
    ("tools", []),
    ("messages", HELLO),
    ("use_beam_search", True),
    ("model", 5),
    ("model", "other"),
    ("model", "x" * 500),
    ("response_format", 5),
)
TOGETHER: dict[str, dict[str, Any]] = {
    "too many sequences": {"prompt": ["a"] * 64, "n": 64},
    "best_of below n": {"best_of": 2, "n": 3},
    "best_of of a stream": {"best_of": 3, "stream": True},
    "prompt_logprobs of a stream": {"prompt_logprobs": 1, "stream": True},
    "continuous usage without usage": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    "two faults": {"temperature": 3, "top_p": 2, "n": 0, "seed": 0.5, "stop": 5, "logprobs": -1, "echo": 5},
    "an end that cannot come": {"allowed_token_ids": [1, 106], "min_tokens": 3},
    "no room": {"prompt": [120] * 2048, "max_tokens": 7},
    "no room, by a text": {"prompt": "word " * 3000},
    "no room, streamed": {"prompt": [120] * 2049, "stream": True},
}
MESSAGES: dict[str, Any] = {
    "no messages": None,
    "an empty list": [],
    "a text": "Hi",
    "a number": [5],
    "an unknown role": [{"role": "critic", "content": "x"}],
    "no content": [{"role": "user"}],
    "an empty content": [{"role": "user", "content": []}],
    "a number as content": [{"role": "user", "content": 5}],
    "a text as a part": [{"role": "user", "content": ["x"]}],
    "an image": [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://localhost/x"}}]}
    ],
    "a sound": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    "an assistant first": [{"role": "assistant", "content": "x"}],
    "a result without a call": [*HELLO, {"role": "tool", "content": "x"}],
    "a call without its function": [
        *HELLO,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]},
    ],
    "too many parts": [{"role": "user", "content": [{"type": "text", "text": ""}] * 4097}] * 4,
}
F = function("f")
TOOLS: dict[str, dict[str, Any]] = {
    "no tools": {"tools": []},
    "a number": {"tools": [5]},
    "no function": {"tools": [{"type": "function"}]},
    "a search": {"tools": [{"type": "web_search"}]},
    "a name with a blank": {"tools": [function("a b")]},
    "a long name": {"tools": [function("f" * 129)]},
    "two of one name": {"tools": [F, F]},
    "513 functions": {"tools": [F] * 513},
    "arguments that are a text": {"tools": [function("f", {"type": "string"})]},
    "a wrong schema": {"tools": [F, function("g", {"properties": {"a": {"type": "objekt"}}})]},
    "a schema that cannot be enforced": {
        "tools": [function("f", {"properties": {"a": {"not": {}}}})],
        "tool_choice": "required",
    },
    "an unknown choice": {"tools": [F], "tool_choice": "always"},
    "a choice of another type": {"tools": [F], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
    "a choice of no function": {"tools": [F], "tool_choice": NAMED},
    "a choice without functions": {"tool_choice": "auto"},
    "the old functions": {"functions": [{"name": "f"}]},
    "the old choice": {"function_call": "auto"},
}
CHATS: dict[str, dict[str, Any]] = {
    "top_logprobs without logprobs": {"top_logprobs": 2},
    "logprobs as a number": {"logprobs": 3},
    "echo": {"echo": True},
    "reasoning_effort": {"reasoning_effort": "high"},
    "both open and begun": {"continue_final_message": True, "add_generation_prompt": True},
    "a turn of the user that goes on": {"continue_final_message": True},
    "max_output_tokens": {"max_output_tokens": 5},
    "a long message": {"messages": [{"role": "user", "content": "word " * 3000}]},
    "another model": {"model": "other"},
    "a wrong value of a stream": {"stream": True, "temperature": 3},
}


def exchanges() -> list[Exchange]:
    values = [
        complete(f"{name} {str(value)[:20]!r} {number}", **{name: value})
        for number, (name, value) in enumerate(VALUES)
    ]
    together = [complete(name, **fields) for name, fields in TOGETHER.items()]
    chats = [chat(name, **fields) for name, fields in CHATS.items()]
    messages = [
        post("/v1/chat/completions", f"messages: {name}", {"messages": value, "max_tokens": 2})
        for name, value in MESSAGES.items()
    ]
    tools = [chat(f"tools: {name}", ASKED, **fields) for name, fields in TOOLS.items()]
    return [*values, *together, *messages, *tools, *chats]
