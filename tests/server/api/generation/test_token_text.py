"""Tokens with their log-probabilities, in OpenAI's and in vLLM's forms."""

import math

from model.interface.sequence_chunk import TokenLogprobs
from server.api.generation.token_text import chat_entry, prompt_entries, token_namer, wire_logprob
from tests.server.text.small_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
A, B = TOKENIZER.encode("a")[-1], TOKENIZER.encode("b")[-1]


def test_minus_infinity_is_a_number_on_the_wire() -> None:
    assert wire_logprob(-0.5) == -0.5
    assert math.isfinite(wire_logprob(-math.inf))


def test_an_entry_shows_as_many_alternatives_as_were_asked_for() -> None:
    token = TokenLogprobs(A, -0.1, [(A, -0.1), (B, -2.0)])
    name = token_namer(TOKENIZER, as_ids=True)
    assert [top["token"] for top in chat_entry(TOKENIZER, name, token, None)["top_logprobs"]] == [
        f"token_id:{A}",
        f"token_id:{B}",
    ]
    assert len(chat_entry(TOKENIZER, name, token, 1)["top_logprobs"]) == 1
    assert chat_entry(TOKENIZER, name, token, 0)["top_logprobs"] == []
    assert chat_entry(TOKENIZER, name, token, 0)["bytes"] == list(TOKENIZER.token_bytes(A))


def test_a_prompt_begins_with_null_and_equals_share_a_rank() -> None:
    token = TokenLogprobs(A, -3.0, [(B, -1.0), (B + 1, -1.0)], rank=3)
    first, second = prompt_entries(TOKENIZER, [token], 2)
    assert first is None
    assert second is not None
    assert {key: entry["rank"] for key, entry in second.items()} == {str(A): 3, str(B): 1, str(B + 1): 1}
