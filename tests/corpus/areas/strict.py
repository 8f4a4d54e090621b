"""A server with keys, strict settings, a template of its own, priorities and a port for metrics; no prefix
cache."""

from typing import Any

from tests.corpus.areas.chats import HELLO, SYSTEM, TURNS
from tests.corpus.areas.decisions import CHOICE, PREDICATE, SCORE
from tests.corpus.exchange import Exchange, get, post, request_bytes
from tests.corpus.servers import KEYS

KEY = {"authorization": f"Bearer {KEYS[0]}"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    f"x-api-key: {KEYS[0]}\r\n"
)


def ask(path: str, name: str, **body: Any) -> Exchange:
    return post(path, name, {"max_tokens": 4, "temperature": 0, **body}, KEY)


def keys() -> list[Exchange]:
    given = {
        "none": {},
        "the second": {"authorization": f"Bearer {KEYS[1]}"},
        "in lower case": {"authorization": f"bearer  {KEYS[0]} "},
        "as X-Api-Key": {"x-api-key": KEYS[0]},
        "wrong": {"authorization": "Bearer corpus-key-3"},
        "a part of one": {"x-api-key": KEYS[0][:-1]},
        "another scheme": {"authorization": f"Basic {KEYS[0]}"},
        "wrong beside right": {"authorization": "Bearer x", "x-api-key": KEYS[0]},
        "not ASCII": {"x-api-key": "\xe9\xff"},
    }
    paths = (
        "/v1/models",
        "/openapi.json",
        "/docs",
        "/nope",
        "/metrics",
        "/health",
        "/health/live",
        "/health/ready",
    )
    twice = request_bytes("GET", "/version", headers={"x-api-key": KEYS[0]})
    return [
        *(get("/version", f"key: {name}", headers) for name, headers in given.items()),
        Exchange("key: twice", twice.replace(b"\r\nx-api-key", b"\r\nx-api-key: x\r\nx-api-key", 1)),
        *(get(path, f"no key for {path}") for path in paths),
        post(COMPLETIONS, "no key for a completion", {"prompt": "a"}),
        post("/v1/messages", "no key for a message", {"max_tokens": 1, "messages": HELLO}),
        post("/v1/messages", "a wrong key for a message", {}, {"x-api-key": "x"}),
    ]


def settings() -> list[Exchange]:
    return [
        get("/v1/models", "models", KEY),
        get("/v1/models/tiny-2", "the second name", KEY),
        get("/openapi.json", "openapi.json", KEY),
        get("/tokenizer_info", "tokenizer_info", KEY),
        get("/version", "a host that is allowed", {**KEY, "host": "models.example:80"}),
        get("/version", "a host that is not", {**KEY, "host": "other.example"}),
        ask(COMPLETIONS, "an unknown parameter", prompt="a", unheard_of=1),
        ask(COMPLETIONS, "an unknown parameter and a fault", prompt="a", unheard_of=1, n=0),
        ask(COMPLETIONS, "known parameters without meaning", prompt="a", store=True),
        ask(CHAT, "an unknown field of a message", messages=[{**HELLO[0], "moon": 1}]),
        ask(CHAT, "one turn", messages=HELLO, return_token_ids=True),
        ask(CHAT, "turns", messages=TURNS, return_token_ids=True),
        ask(CHAT, "turns, streamed", messages=TURNS, stream=True),
        ask(CHAT, "turns that do not alternate", messages=[*HELLO, *HELLO]),
        ask(CHAT, "what the template refuses", messages=[SYSTEM, *HELLO]),
        ask("/tokenize", "the template", messages=TURNS, max_tokens=None, temperature=None),
        ask(COMPLETIONS, "more than the room left", prompt=[120] * 500, max_tokens=100),
        ask(COMPLETIONS, "just the room left", prompt=[120] * 508),
        ask(COMPLETIONS, "a priority", prompt="a", priority=-5),
        ask(COMPLETIONS, "the second name of the model", prompt="a", model="tiny-2"),
        ask(COMPLETIONS, "a long prompt, never from a cache", prompt="a b c " * 20),
        ask(COMPLETIONS, "the same, never from a cache", prompt="a b c " * 20),
        ask("/v1/messages", "an unknown field of Anthropic's", messages=HELLO, moon=1),
        post(
            "/v1/decisions",
            "several questions",
            {"input": "Twice.", "questions": [PREDICATE, CHOICE, SCORE]},
            KEY,
        ),
        Exchange("a head that does not arrive", HEAD.encode()),
        Exchange("a body that does not arrive", (HEAD + "content-length: 1000\r\n\r\n{").encode()),
    ]


def metrics() -> list[Exchange]:
    return [
        get("/metrics", "not on the port of the API", KEY),
        get("/metrics", "on its own port", listener="metrics"),
        get("/nope", "an unknown path there", listener="metrics"),
        get("/metrics", "an unknown host there", {"host": "evil.example"}, listener="metrics"),
        Exchange("another method there", request_bytes("POST", "/metrics"), listener="metrics"),
        Exchange("no HTTP there", b"\x00\r\n\r\n", listener="metrics"),
    ]


def exchanges() -> list[Exchange]:
    return [*keys(), *settings(), *metrics()]
