"""/v1/embeddings: inputs of every form, both encodings, and what is refused."""

from typing import Any

from tests.corpus.areas.completions import IDS, LONG
from tests.corpus.exchange import Exchange, post

PATH = "/v1/embeddings"


def embed(name: str, given: Any, **fields: Any) -> Exchange:
    return post(PATH, name, {"input": given, **fields})


def exchanges() -> list[Exchange]:
    return [
        embed("a text", "The city of light"),
        embed("the same text", "The city of light"),
        embed("in base64", "The city of light", encoding_format="base64"),
        embed("several texts", ["One", "Two words", "日本 é 🙂"], encoding_format="base64"),
        embed("token ids", IDS, encoding_format="base64"),
        embed("several lists of ids", [IDS[:2], IDS], encoding_format="base64"),
        embed("a text of several steps", LONG, encoding_format="base64"),
        embed("cut", LONG, truncate_prompt_tokens=10, encoding_format="base64"),
        embed("cut to the context", LONG, truncate_prompt_tokens=-1, encoding_format="base64"),
        embed("fields without meaning", "a", user="u", unheard_of=1, encoding_format="base64"),
    ]


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "nothing": (None, {}),
    "an empty list": ([], {}),
    "an empty text": ("", {}),
    "an empty text among others": (["a", ""], {}),
    "a number": (5, {}),
    "a mixture": (["a", 5], {}),
    "an unknown token": ([2, 10**6], {}),
    "other dimensions": ("a", {"dimensions": 3}),
    "an unknown encoding": ("a", {"encoding_format": "int8"}),
    "a stream": ("a", {"stream": True}),
    "another model": ("a", {"model": "other"}),
    "a long text": ("word " * 3000, {}),
    "many ids": ([120] * 3000, {}),
    "a priority": ("a", {"priority": 3}),
}


def refused() -> list[Exchange]:
    return [embed(name, given, **fields) for name, (given, fields) in REFUSED.items()]
