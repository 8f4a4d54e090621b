"""/tokenize, /detokenize and /tokenizer_info."""

from typing import Any

from tests.corpus.areas.chats import HELLO, SYSTEM, TURNS
from tests.corpus.exchange import Exchange, get, post


def tokenize(name: str, **body: Any) -> Exchange:
    return post("/tokenize", name, body)


def detokenize(name: str, tokens: Any, **fields: Any) -> Exchange:
    return post("/detokenize", name, {"tokens": tokens, **fields})


def exchanges() -> list[Exchange]:
    return [
        get("/tokenizer_info"),
        tokenize("a text", prompt="The city of light"),
        tokenize(
            "without a BOS", prompt="The city of light", add_special_tokens=False, return_token_strs=True
        ),
        tokenize("control tokens", prompt="<bos>a<end_of_turn>\n\n\nb", return_token_strs=True),
        tokenize("other alphabets", prompt="日本 é 🙂 ☃ \u0000", return_token_strs=True),
        tokenize("an empty text", prompt=""),
        tokenize("a chat", messages=HELLO, return_token_strs=True),
        tokenize("turns", messages=[SYSTEM, *TURNS], add_generation_prompt=False),
        tokenize(
            "an open turn", messages=TURNS[:2], continue_final_message=True, add_generation_prompt=False
        ),
        tokenize("an unknown field", prompt="a", unheard_of=1),
        detokenize("ids", [2, 120, 150, 180, 105, 106, 1]),
        detokenize("half a character", [111 + 0xC3 + 1]),
        detokenize("nothing", []),
    ]


def refused() -> list[Exchange]:
    return [
        tokenize("neither prompt nor messages"),
        tokenize("both", prompt="a", messages=HELLO),
        tokenize("a list", prompt=["a"]),
        tokenize("half a character alone", prompt="\ud800"),
        tokenize("no turns", messages=[]),
        tokenize(
            "an image",
            messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        ),
        tokenize(
            "wrong functions", messages=HELLO, tools=[{"type": "function", "function": {"name": "a b"}}]
        ),
        tokenize("another model", prompt="a", model="other"),
        tokenize("a text that is too long", prompt="a" * (2**20 + 1)),
        detokenize("an unknown id", [10**6]),
        detokenize("a negative id", [-1]),
        detokenize("texts", ["a"]),
        detokenize("no list", 5),
        post("/detokenize", "no tokens", {}),
    ]
