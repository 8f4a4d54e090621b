"""Requests that decode together, the same ones from step to step: what is asked of each of them in each step, as arrays, so
that a step of hundreds of them costs the host little. Imports no torch."""

from collections.abc import Iterator
from functools import partial
from itertools import repeat

import numpy as np
import numpy.typing as npt

from server.engine.request import Request, TokenOutput

_new_output = partial(tuple.__new__, TokenOutput)


class DecodeGroup:
    """It holds as long as its requests, and no others, run and get a token each in every step."""

    def __init__(self, requests: list[Request]) -> None:
        """Of requests all of whose tokens but the last are computed, or are by the step that ``advance`` tells of."""
        self.requests = requests
        self.num_tokens = np.array([request.num_tokens for request in requests], dtype=np.int64)
        self.last_token_ids: npt.NDArray[np.int64] = np.zeros(len(requests), np.int64)
        self.begins_block: list[Request] = []  # those whose last token is the first of a block
        self._max_num_tokens = np.array([request.max_num_tokens for request in requests], dtype=np.int64)
        self._token_lists = [request.token_ids for request in requests]
        self._num_cached_tokens = [request.num_cached_tokens for request in requests]
        self._timings = [request.timings for request in requests]
        self._ending_ids = frozenset[int]().union(*{request.ending_ids for request in requests})

    def ending(self, token_ids: list[int]) -> list[int]:
        """Indices of the requests that end, well or not, with these tokens."""
        ending = np.flatnonzero(self.num_tokens + 1 >= self._max_num_tokens).tolist()
        if not self._ending_ids.isdisjoint(token_ids):
            more = [i for i, token_id in enumerate(token_ids) if token_id in self.requests[i].ending_ids]
            ending = sorted({*ending, *more})
        return ending

    def advance(self, token_ids: list[int], block_size: int) -> Iterator[TokenOutput]:
        """All tokens so far are computed, and each request gets one more: the outputs."""
        for request, num_tokens in zip(self.requests, self.num_tokens.tolist(), strict=True):
            request.num_computed_tokens = num_tokens
        for tokens, token_id in zip(self._token_lists, token_ids, strict=True):
            tokens.append(token_id)
        self.begins_block = [self.requests[i] for i in np.flatnonzero(self.num_tokens % block_size == 0).tolist()]
        self.num_tokens = self.num_tokens + 1
        self.last_token_ids = np.array(token_ids, dtype=np.int64)
        # The values of every field, put together without a call in Python for each request.
        lists = [[token_id] for token_id in token_ids]
        nothing = repeat(None)
        return map(
            _new_output, zip(lists, self._num_cached_tokens, self._timings, repeat(()), nothing, nothing, nothing, nothing)
        )

    def check(self) -> None:
        """Assert that the arrays say what the requests say."""
        for request, num_tokens, last in zip(self.requests, self.num_tokens, self.last_token_ids, strict=True):
            assert (request.num_tokens, request.num_computed_tokens) == (num_tokens, num_tokens - 1)
            assert request.token_ids[-1] == last
