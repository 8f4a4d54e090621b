"""Seeded requests that run at the same time: what each of them says does not depend on the others. Every one
has a salt of its own, so that none finds what another has computed."""

from dataclasses import replace

from tests.corpus.areas.chats import chat
from tests.corpus.areas.completions import LONG, complete
from tests.corpus.areas.embeddings import embed
from tests.corpus.areas.responses import respond
from tests.corpus.exchange import Exchange


def _generating(salt: str) -> list[Exchange]:
    drawn = {"temperature": 1.0, "max_tokens": 24}
    return [
        *(
            complete(f"completion {seed}", seed=seed, cache_salt=f"{salt} {seed}", logprobs=2, **drawn)
            for seed in range(4)
        ),
        complete("a long prompt", LONG, seed=4, cache_salt=f"{salt} 4", logprobs=1, **drawn),
        complete("greedy", cache_salt=f"{salt} 5", max_tokens=24),
        complete("three choices", n=3, seed=5, cache_salt=f"{salt} 6", **drawn),
        complete("a constraint", guided_regex="[a-z]{12}", seed=6, cache_salt=f"{salt} 7", **drawn),
        chat("chat", seed=7, cache_salt=f"{salt} 8", presence_penalty=1, **drawn),
        respond("response", seed=8, cache_salt=f"{salt} 9", temperature=1),
    ]


def exchanges() -> list[Exchange]:
    found = [
        *_generating("whole"),
        *(exchange.streamed() for exchange in _generating("streamed")),
        embed("embedding", LONG),
        embed("two embeddings", ["One", "Two"]),
    ]
    return [replace(exchange, group="at once") for exchange in found]
