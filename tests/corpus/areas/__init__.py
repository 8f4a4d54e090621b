"""The exchanges, one file for each area, and which server is asked what."""

from collections.abc import Mapping, Sequence

from tests.corpus.areas import (
    about,
    chats,
    completions,
    concurrent,
    decisions,
    embeddings,
    failures,
    heads,
    messages,
    overload,
    refusals,
    responses,
    strict,
    structured_output,
    tokens,
    tools,
)
from tests.corpus.exchange import Exchange

DEMO_MODEL = "gemma-3-270m"
_GENERATION = {
    "completions": completions.exchanges(),
    "chats": chats.exchanges(),
    "tools": tools.exchanges(),
    "structured output": structured_output.exchanges(),
    "responses": responses.exchanges(),
    "messages": messages.exchanges(),
    "embeddings": embeddings.exchanges(),
    "decisions": decisions.exchanges(),
    "tokens": tokens.exchanges(),
    "concurrent": concurrent.exchanges(),
}

# By the name of the server and of the area, in the order in which they are sent.
AREAS: Mapping[str, Mapping[str, Sequence[Exchange]]] = {
    "tiny": {
        "about": [*about.models("tiny"), *about.health(), *about.documents(), *about.paths()],
        **_GENERATION,
        "heads": heads.exchanges(),
        "refusals": refusals.exchanges(),
        "refused structured output": structured_output.refused(),
        "refused responses": responses.refused(),
        "refused messages": messages.refused(),
        "refused embeddings": embeddings.refused(),
        "refused decisions": decisions.refused(),
        "refused tokens": tokens.refused(),
        "metrics": about.metrics(),
    },
    "strict": {"strict": strict.exchanges()},
    "full": {"overload": overload.exchanges()},
    "poisoned": {"failures": failures.exchanges()},
    "demo": {
        "about": [*about.models(DEMO_MODEL), *about.health()],
        **_GENERATION,
        "metrics": about.metrics(),
    },
}
