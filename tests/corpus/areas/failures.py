"""A model whose numbers are not finite, before the first token and after it, on every endpoint that computes.
The server goes on."""

from tests.corpus.areas import chats, completions, decisions, embeddings, messages, responses
from tests.corpus.exchange import Exchange, both_ways
from tests.corpus.tiny_model import POISON

PROMPT = f"All is well {POISON}"
ASKED = [{"role": "user", "content": PROMPT}]
# The token is drawn last, and the network is to go on from it.
LATER = {"guided_choice": [f"So far {POISON} and no further"]}


def exchanges() -> list[Exchange]:
    fine = [{"role": "user", "content": "All is well."}]
    return [
        *both_ways(
            completions.complete("completion: at once", PROMPT),
            completions.complete("completion: later", "All is well.", max_tokens=40, **LATER),
            completions.complete("completion: with usage", "Well.", max_tokens=40, **LATER),
            chats.chat("chat: at once", ASKED),
            chats.chat("chat: later", fine, max_tokens=40, **LATER),
            responses.respond("response: at once", input=PROMPT),
            responses.respond("response: later", input="All is well.", max_output_tokens=40, **LATER),
            messages.create("message: at once", messages=ASKED),
            messages.create(
                "message: later",
                messages=fine,
                max_tokens=40,
                output_config=messages.constant(LATER["guided_choice"][0]),
            ),
        ),
        completions.complete("completion: one of two prompts", [f"a {POISON}", "b"]),
        embeddings.embed("embedding", PROMPT),
        embeddings.embed("embedding: one of two", ["fine", PROMPT]),
        decisions.decide("decision", decisions.PREDICATE, input=PROMPT),
        completions.complete("prompt_logprobs", PROMPT, prompt_logprobs=1, max_tokens=0),
        completions.complete("completion: all is well again", "All is well."),
    ]
