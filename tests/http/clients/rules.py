"""The rules of the wire format that a client sees in an answer: what is asked, and what must be so beyond
equality with the same answer in one piece over raw HTTP."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fakes import BOS
from tests.http.clients import texts
from tests.http.clients.adapters import CHAT, COMPLETIONS, MODEL
from tests.http.clients.seen import Seen
from tests.http.tool_requests import NAMED, SCHEMA, TOOLS
from tests.scripted import TOKENIZER

Check = Callable[[Seen], None]
HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = "The capital of France is"
WITHOUT_BOS = TOKENIZER.encode(PROMPT)[1:]
CONTEXT = 1536
SUN_TOKENS = len(TOKENIZER.encode_plain(texts.TEXTS[texts.SUN]))


@dataclass(frozen=True)
class Rule:
    ids: str  # of tests/http/README.md
    kind: str
    body: dict[str, Any]
    check: Check = lambda seen: None
    shape: Check = lambda seen: None  # of chunks as the server sent them


def rule(
    *ids: str, kind: str, check: Check = lambda seen: None, shape: Check = lambda seen: None, **body: Any
) -> Rule:
    asked = {"prompt": "Hello"} if kind == COMPLETIONS else {"messages": HELLO}
    return Rule(" ".join(ids), kind, {**asked, **body}, check, shape)


def expect(
    *,
    tokens: int | None = None,
    prompt: int | None = None,
    reason: str | None = None,
    text: str | None = None,
) -> Check:
    def check(seen: Seen) -> None:
        assert tokens is None or seen.usage["completion_tokens"] == tokens
        assert prompt is None or seen.usage["prompt_tokens"] == prompt
        assert reason is None or seen.reason() == reason
        assert text is None or seen.text() == text

    return check


def envelope(seen: Seen) -> None:
    prefix, names = (
        ("cmpl-", {"text_completion"}) if seen.kind == COMPLETIONS else ("chatcmpl-", {"chat.completion"})
    )
    if seen.streamed and seen.kind == CHAT:
        names = {"chat.completion.chunk"}
    for field in ("id", "created", "model", "system_fingerprint"):
        assert len({chunk[field] for chunk in seen.chunks}) == 1, field
    assert seen.chunks[0]["id"].startswith(prefix)
    assert seen.chunks[0]["model"] == MODEL
    assert {chunk["object"] for chunk in seen.chunks} == names
    for piece in seen.pieces():
        assert {"index", "finish_reason", "logprobs"} <= set(piece)


def stream_shape(seen: Seen) -> None:
    """One chunk per token, the reason alone at the end, then the usage; null before."""
    if not seen.streamed:
        return
    pieces = seen.pieces()
    assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert all(len(chunk["choices"]) == 1 and chunk["usage"] is None for chunk in seen.chunks[:-1])
    assert seen.chunks[-1]["choices"] == []
    if seen.kind == COMPLETIONS:
        assert pieces[-1]["text"] == ""
        assert len(pieces) == seen.usage["completion_tokens"] + 1
    else:
        assert seen.messages()[0] == {"role": "assistant", "content": ""}
        assert seen.messages()[-1] == {}
        assert all(set(message) == {"content"} for message in seen.messages()[1:-1])
        assert len(pieces) == seen.usage["completion_tokens"] + 2


def completion(seen: Seen) -> None:
    expect(tokens=16, reason="length")(seen)
    assert seen.logprobs() is None


def many(seen: Seen) -> None:
    assert sorted(seen.indices) == [0, 1, 2, 3]
    assert seen.streamed or seen.indices == [0, 1, 2, 3]
    assert len({seen.text(index) for index in range(4)}) == 4
    assert seen.usage["prompt_tokens"] == 2 * len(TOKENIZER.encode(PROMPT))
    assert seen.usage["completion_tokens"] == 4 * 8
    assert seen.usage["total_tokens"] == seen.usage["prompt_tokens"] + 4 * 8
    # The same was asked before, over raw HTTP.
    assert (
        seen.usage["prompt_tokens_details"]["cached_tokens"]
        == 2 * (len(TOKENIZER.encode(PROMPT)) - 1) // 8 * 8
    )


def offsets(seen: Seen) -> None:
    logprobs = seen.logprobs()
    assert logprobs is not None
    assert logprobs["text_offset"][0] == len("Hello")
    assert "".join(logprobs["tokens"]) == seen.text()
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == value
        assert len(top) in (2, 3)


def only_echoed(seen: Seen) -> None:
    echoed(seen)
    expect(tokens=0, text=PROMPT, reason="length")(seen)


def echoed(seen: Seen) -> None:
    logprobs = seen.logprobs()
    assert logprobs is not None
    assert seen.text().startswith(PROMPT)
    assert seen.pieces()[0]["text"].startswith(PROMPT)
    assert logprobs["tokens"][0] == "<bos>"
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    expected = len(TOKENIZER.encode(PROMPT)) + seen.usage["completion_tokens"]
    assert {len(values) for values in logprobs.values()} == {expected}


def only_sampled(seen: Seen) -> None:
    logprobs = seen.logprobs()
    assert logprobs is not None
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def chat_entries(seen: Seen) -> None:
    logprobs = seen.logprobs()
    assert logprobs is not None
    assert b"".join(bytes(entry["bytes"]) for entry in logprobs["content"]).decode() == seen.text()
    assert all(len(entry["top_logprobs"]) in (2, 3) for entry in logprobs["content"])
    assert all(entry["logprob"] > -10_000 for entry in logprobs["content"])


def two_choices(equal: bool) -> Check:
    def check(seen: Seen) -> None:
        assert sorted(seen.indices) == [0, 1]
        assert (seen.text(0) == seen.text(1)) is equal

    return check


def calls(*expected: list[str]) -> Check:
    def check(seen: Seen) -> None:
        assert seen.calls() == list(expected) or not expected
        for name, arguments in seen.calls():
            assert name in ("get_weather", "get_time")
            json.loads(arguments)
        assert seen.calls()

    return check


def place(seen: Seen) -> None:
    assert seen.reason() == "stop"
    value = json.loads(seen.text())
    assert value["city"] in ("Paris", "Rome")
    assert seen.text() == json.dumps(value, separators=(",", ":"))


def token_ids(seen: Seen) -> None:
    found = [token for piece in seen.pieces() for token in piece.get("token_ids") or ()]
    assert len(found) == seen.usage["completion_tokens"]


def growing_usage(seen: Seen) -> None:
    if seen.streamed:
        counts = [chunk["usage"]["completion_tokens"] for chunk in seen.chunks]
        assert counts == [1, 2, 3, 4, 4, 4]


NULLS: dict[str, Any] = dict.fromkeys(
    ["max_tokens", "temperature", "top_p", "n", "logprobs", "stop", "logit_bias", "best_of"]
)
SEEDED: dict[str, Any] = {"temperature": 1, "seed": texts.RANDOM}
MIXED = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
    {"role": "user", "content": "Hi", "name": "anna"},
    {"role": "user", "content": [{"type": "text", "text": "You"}, {"type": "text", "text": "there"}]},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Bye"},
]
HISTORY = [
    *HELLO,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
CALL, CALLED = ["get_weather", texts.ARGUMENTS], expect(reason="tool_calls")
SCRIPTED: dict[str, Any] = {"temperature": 1, "max_tokens": 300}

RULES = [
    rule("C1", "C2", "C10", "S2", "S15", "I5", "N4", kind=COMPLETIONS, **SEEDED,
         check=completion, shape=envelope),
    rule("C4", kind=COMPLETIONS, **{**NULLS, "temperature": 0}, check=completion),
    rule("S1", "S3", "S5", "S6", "S12", kind=COMPLETIONS, **SEEDED, max_tokens=5, shape=stream_shape),
    rule("S7", kind=COMPLETIONS, max_tokens=4, temperature=0, shape=growing_usage,
         stream_options={"include_usage": True, "continuous_usage_stats": True}),
    *(
        rule("C5", "C6", kind=COMPLETIONS, prompt=prompt, temperature=0,
             check=expect(tokens=16, prompt=length))
        for prompt, length in [
            (PROMPT, len(WITHOUT_BOS) + 1),
            ([PROMPT], len(WITHOUT_BOS) + 1),
            (WITHOUT_BOS, len(WITHOUT_BOS)),
            ([[BOS, *WITHOUT_BOS]], len(WITHOUT_BOS) + 1),
        ]
    ),
    rule("C7", "C8", "C9", "S8", "M11", kind=COMPLETIONS, prompt=[PROMPT, PROMPT[::-1]], n=2,
         max_tokens=8, **SEEDED, check=many),
    rule("C11", "M6", "I7", kind=COMPLETIONS, **SCRIPTED, seed=texts.PLAIN, stop=["clock", "zz"],
         check=expect(text="It is 10 o'", reason="stop")),
    rule("M7", "M8", "M9", kind=COMPLETIONS, **SCRIPTED, seed=texts.SUN,
         check=expect(text=texts.TEXTS[texts.SUN], reason="stop", tokens=SUN_TOKENS + 1)),
    rule("S4", kind=COMPLETIONS, **SEEDED, logprobs=2, check=offsets),
    rule("S9", "L1", "L2", "L7", kind=COMPLETIONS, prompt=PROMPT, **SEEDED, max_tokens=3, logprobs=1,
         echo=True, check=echoed),
    rule("L3", kind=COMPLETIONS, **SEEDED, logprobs=0, check=only_sampled),
    rule("L5", kind=COMPLETIONS, prompt=PROMPT, max_tokens=0, logprobs=1, echo=True,
         check=only_echoed),
    rule("L6", kind=COMPLETIONS, max_tokens=0, check=expect(tokens=0, text="", reason="length")),
    rule("M1", kind=COMPLETIONS, prompt=[9] * (CONTEXT - 6), max_tokens=500, temperature=0,
         check=expect(tokens=6, reason="length")),
    rule("M4", kind=COMPLETIONS, temperature=0, n=2, check=two_choices(equal=True)),
    rule("M5", kind=COMPLETIONS, **SEEDED, n=2, check=two_choices(equal=False)),
    rule("M15", kind=COMPLETIONS, temperature=0, user="anna", store=True, prompt_cache_key="k"),
    rule("M16", kind=COMPLETIONS, temperature=0, priority=0),
    rule("M17", kind=COMPLETIONS, **SEEDED, return_token_ids=True, shape=token_ids),
    rule("H1", "H2", "C10", "S2", "S15", "I5", kind=CHAT, **SEEDED, max_tokens=9,
         check=expect(tokens=9, reason="length"), shape=envelope),
    rule("H4", "S3", "S5", "S6", "S10", kind=CHAT, **SEEDED, max_tokens=6, shape=stream_shape),
    rule("H3", "H13", kind=CHAT, temperature=1, seed=texts.PLAIN,
         check=expect(text=texts.TEXTS[texts.PLAIN], reason="stop")),
    rule("H3", kind=CHAT, **SEEDED, max_completion_tokens=4, max_tokens=9, check=expect(tokens=4)),
    rule("H5", "H7", "I8", kind=CHAT, **SEEDED, max_tokens=20, logprobs=True, top_logprobs=2,
         check=chat_entries),
    rule("H9", "H10", kind=CHAT, messages=MIXED, **SEEDED, max_tokens=5),
    rule("H9", kind=CHAT, messages=HISTORY, tools=TOOLS, **SCRIPTED, seed=texts.PLAIN,
         check=expect(text=texts.TEXTS[texts.PLAIN])),
    rule("H11", "H12", kind=CHAT, messages=[{"role": "user", "content": "<end_of_turn>"}], **SEEDED,
         # BOS, two begins and an end of turns
         max_tokens=5, check=expect(prompt=4 + len("user\n<end_of_turn>\nmodel\n"))),
    rule("H2", "H8", "M12", kind=CHAT, tools=TOOLS, **SCRIPTED, seed=texts.ONLY_CALL,
         check=calls(CALL), shape=CALLED),
    rule("H8", kind=CHAT, tools=TOOLS, **SCRIPTED, seed=texts.TWO_CALLS,
         check=calls(CALL, ["get_time", "{}"]), shape=CALLED),
    rule("H2", "H8", kind=CHAT, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **SEEDED,
         check=calls(), shape=CALLED),
    rule("H2", "H8", kind=CHAT, tools=TOOLS, tool_choice=NAMED, **SEEDED,
         check=calls(), shape=expect(reason="stop")),
    rule("M13", kind=CHAT, response_format=FORMAT, **SEEDED, check=place),
    rule("M5", kind=CHAT, **SEEDED, max_tokens=9, n=2, check=two_choices(equal=False)),
]  # fmt: skip
