"""Requests that decode together, the same ones from step to step: what is asked of each of them in each step,
as arrays, so that a step of hundreds of them costs the host little. Imports no torch."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import overload

import numpy as np
import numpy.typing as npt

from server.engine.request import Request, TokenOutput

_new_output = partial(tuple.__new__, TokenOutput)


class DecodeGroup:
    """It holds as long as its requests, and no others, run and get a token each in every step."""

    def __init__(self, requests: list[Request], block_size: int) -> None:
        """Of requests all of whose tokens but the last are computed, or are by the step that ``advance``
        tells of."""
        self.requests = requests
        lengths = [request.num_tokens for request in requests]
        self.num_tokens = np.array(lengths, dtype=np.int64)
        self.last_token_ids: npt.NDArray[np.int64] = np.zeros(len(requests), np.int64)
        self.begins_block: list[Request] = []  # those whose last token is the first of a block
        # The requests that begin a block after a step, by its number modulo the size of a block.
        self._beginning: list[list[Request]] = [[] for _ in range(block_size)]
        for request, length in zip(requests, lengths, strict=True):
            self._beginning[-length % block_size].append(request)
        self._num_steps = 0
        # Tokens until the first of them has as many as it may.
        self._steps_left = min(
            request.max_num_tokens - length for request, length in zip(requests, lengths, strict=True)
        )
        self._token_lists = [request.token_ids for request in requests]
        self._num_cached_tokens = [request.num_cached_tokens for request in requests]
        self._timings = [request.timings for request in requests]
        self._ending_ids = frozenset[int]().union(*{request.ending_ids for request in requests})

    def can_run_ahead(self, running: list[Request]) -> bool:
        """Whether the group is all that runs, and none of it ends by length with its next token."""
        return len(self.requests) == len(running) and self._steps_left > 1

    @property
    def next_to_begin_block(self) -> list[Request]:
        """Those whose next token is the first of a block."""
        return self._beginning[self._num_steps % len(self._beginning)]

    def goes_on(self, token_ids: list[int]) -> bool:
        """Whether none of the requests ends, well or not, with these tokens."""
        if self._steps_left <= 1:
            return False
        if self._ending_ids.isdisjoint(token_ids):
            return True
        return not any(token_id in self.requests[i].ending_ids for i, token_id in enumerate(token_ids))

    def advance(self, token_ids: list[int]) -> "GroupOutputs":
        """All tokens so far are computed, and each request gets one more: the outputs."""
        for request, num_tokens in zip(self.requests, self.num_tokens.tolist(), strict=True):
            request.num_computed_tokens = num_tokens
        for tokens, token_id in zip(self._token_lists, token_ids, strict=True):
            tokens.append(token_id)
        self.begins_block = self.next_to_begin_block
        self._num_steps += 1
        self._steps_left -= 1
        self.num_tokens = self.num_tokens + 1
        self.last_token_ids = np.array(token_ids, dtype=np.int64)
        return GroupOutputs(self, token_ids)

    def outputs(self, token_ids: list[int]) -> Iterator[TokenOutput]:
        """Of requests that got these tokens, at any time afterwards and in any thread."""
        # The values of every field, put together without a call in Python for each request.
        lists = [[token_id] for token_id in token_ids]
        nothing = repeat(None)
        return map(
            _new_output,
            zip(
                lists, self._num_cached_tokens, self._timings, repeat(()), nothing, nothing, nothing, nothing
            ),
        )

    def check(self, block_size: int) -> None:
        """Assert that the group says what the requests say."""
        assert self._steps_left == min(
            request.max_num_tokens - request.num_tokens for request in self.requests
        )
        assert self.begins_block == [
            r for r in self.requests if self._num_steps and r.num_computed_tokens % block_size == 0
        ]
        for request, num_tokens, last in zip(
            self.requests, self.num_tokens, self.last_token_ids, strict=True
        ):
            assert (request.num_tokens, request.num_computed_tokens) == (num_tokens, num_tokens - 1)
            assert request.token_ids[-1] == last


class GroupOutputs(Sequence[tuple[Request, TokenOutput]]):
    """What a step yielded for a group that goes on. The outputs themselves are made by whoever reads them:
    the event loop's thread, beside the next step."""

    def __init__(self, group: DecodeGroup, token_ids: list[int]) -> None:
        self._group = group
        self._token_ids = token_ids

    def __len__(self) -> int:
        return len(self._token_ids)

    def __iter__(self) -> Iterator[tuple[Request, TokenOutput]]:
        return zip(self._group.requests, self._group.outputs(self._token_ids), strict=True)

    @overload
    def __getitem__(self, index: int) -> tuple[Request, TokenOutput]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[Request, TokenOutput]]: ...

    def __getitem__(
        self, index: int | slice
    ) -> tuple[Request, TokenOutput] | list[tuple[Request, TokenOutput]]:
        return list(self)[index]
