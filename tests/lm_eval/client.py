"""What lm-eval's ``local-completions`` with ``tokenizer_backend=remote`` does on the wire, request by
request, and how it reads the answers, without lm-eval itself."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import httpx

MAX_LENGTH = 2047  # lm-eval's default, less the token to be generated


class LmEvalClient:
    def __init__(self, client: httpx.Client, model: str) -> None:
        self._client = client
        self._model = model
        self.info = client.get("/tokenizer_info").raise_for_status().json()

    def encode(self, text: str) -> list[int]:
        response = self._client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        tokens: list[int] = response.raise_for_status().json()["tokens"]
        return tokens

    def decode(self, tokens: list[int]) -> str:
        return str(
            self._client.post("/detokenize", json={"tokens": tokens}).raise_for_status().json()["prompt"]
        )

    def loglikelihood(self, pairs: Sequence[tuple[str, str]], batch_size: int) -> list[tuple[float, bool]]:
        """Of (context, continuation). The longest are sent first, in batches."""
        encoded = [self._encode_pair(context, continuation) for context, continuation in pairs]
        order = sorted(range(len(pairs)), key=lambda index: (-len(encoded[index][0]), encoded[index][0]))
        results: dict[int, tuple[float, bool]] = {}
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            answer = self._score([encoded[index][0][-MAX_LENGTH:] for index in batch])
            lengths = [encoded[index][1] - max(0, len(encoded[index][0]) - MAX_LENGTH) for index in batch]
            results.update(zip(batch, parse_logprobs(answer, lengths), strict=True))
        return [results[index] for index in range(len(pairs))]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """The tokens of both, and how many of them are the context's. Blanks at its end count as the
        continuation's."""
        return self.encode(context + continuation), len(self.encode(context.rstrip()))

    def _score(self, prompts: list[list[int]]) -> dict[str, Any]:
        response = self._client.post("/v1/completions", json=scoring_body(self._model, prompts))
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer


def scoring_body(model: str, prompts: list[list[int]]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }


def parse_logprobs(answer: dict[str, Any], context_lengths: Sequence[int]) -> list[tuple[float, bool]]:
    """(sum, is greedy) of each continuation. The last entry is taken for the generated token; values are
    compared as floats."""
    results = []
    for choice, context_length in zip(
        sorted(answer["choices"], key=itemgetter("index")), context_lengths, strict=True
    ):
        values = choice["logprobs"]["token_logprobs"][context_length:-1]
        tops = choice["logprobs"]["top_logprobs"][context_length:-1]
        is_greedy = all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
        results.append((sum(values), is_greedy))
    return results
