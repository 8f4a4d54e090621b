"""A server of one place, taken by a stream of two sequences: what comes then is refused until it ends."""

from dataclasses import replace

from tests.corpus.areas.chats import chat
from tests.corpus.areas.completions import complete
from tests.corpus.areas.decisions import PREDICATE, decide
from tests.corpus.areas.embeddings import embed
from tests.corpus.areas.messages import create
from tests.corpus.areas.responses import respond
from tests.corpus.exchange import Exchange, both_ways, get

# Both sequences together run for minutes: one waits for the other, and nothing ends them early.
STREAM = complete(
    "", ["a", "b"], max_tokens=30_000, ignore_eos=True, temperature=1, seed=1, stream=True
).request


def exchanges() -> list[Exchange]:
    refused = [
        *both_ways(complete("completion"), chat("chat"), respond("response"), create("message")),
        complete("three choices", n=3),
        embed("embedding", "a"),
        decide("decision", PREDICATE),
        get("/health"),
        get("/v1/models"),
    ]
    before = [complete("one that is larger than the queue", n=3, temperature=1, seed=1)]
    return [*before, *(replace(exchange, beside=STREAM) for exchange in refused)]
