"""What a step means to clients: what its results add to requests, and whether they end them. Imports no
torch."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import overload

from model.interface.sequence_chunk import NO_TOKEN, ChunkResult
from server.engine.request import FinishReason, Request, RequestExpiredError, RequestFailedError, TokenOutput

RequestEvent = tuple[Request, TokenOutput | RequestFailedError | RequestExpiredError]
_new_output = partial(tuple.__new__, TokenOutput)


class StepOutputs(Sequence[RequestEvent]):
    """What a step yielded, a request after the other: a token and nothing else, or an event. Outputs of bare
    tokens are made by whoever reads them, at any time afterwards: the event loop's thread, beside the next
    step."""

    def __init__(self, requests: list[Request], token_ids: list[int]) -> None:
        self._requests = requests
        self._token_ids = token_ids
        self._events: dict[int, TokenOutput | RequestFailedError | RequestExpiredError] = {}

    def set_event(self, index: int, event: TokenOutput | RequestFailedError | RequestExpiredError) -> None:
        """The request of this index yielded more, or less, than its token."""
        self._events[index] = event

    def add(self, request: Request, event: TokenOutput | RequestFailedError | RequestExpiredError) -> None:
        self._events[len(self._requests)] = event
        self._requests.append(request)
        self._token_ids.append(NO_TOKEN)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestEvent]:
        pairs = zip(self._requests, self._outputs(), strict=True)
        if not self._events:
            return pairs
        return ((request, self._events.get(i, output)) for i, (request, output) in enumerate(pairs))

    def _outputs(self) -> Iterator[TokenOutput]:
        # The values of every field, put together without a call in Python for each request.
        lists = [[token_id] for token_id in self._token_ids]
        num_cached = [request.num_cached_tokens for request in self._requests]
        timings = [request.timings for request in self._requests]
        nothing = repeat(None)
        return map(
            _new_output, zip(lists, num_cached, timings, repeat(()), nothing, nothing, nothing, nothing)
        )

    @overload
    def __getitem__(self, index: int) -> RequestEvent: ...

    @overload
    def __getitem__(self, index: slice) -> list[RequestEvent]: ...

    def __getitem__(self, index: int | slice) -> RequestEvent | list[RequestEvent]:
        return list(self)[index]


def append_result(request: Request, result: ChunkResult, clock: Callable[[], float]) -> TokenOutput:
    """Give a request the tokens of a result without an error. The output says whether the request has
    ended."""
    request.token_ids.extend(result.token_ids)
    if request.grammar is not None:
        for token_id in result.token_ids:
            # these end the request, and the grammar lets them
            if token_id not in request.sampling.stop_token_ids:
                request.grammar.accept(token_id)
    reason, stop_token_id = _finish_reason(request)
    is_first, request.has_output = not request.has_output, True
    if is_first:
        request.timings.first_token = clock()
    return TokenOutput(
        token_ids=result.token_ids,
        num_cached_tokens=request.num_cached_tokens,
        timings=request.timings,
        logprobs=result.logprobs,
        prompt_logprobs=request.prompt_logprobs
        if is_first and request.sampling.prompt_logprobs is not None
        else None,
        finish_reason=reason,
        stop_token_id=stop_token_id,
        mean_hidden=None if request.hidden_sum is None else request.hidden_sum / request.num_prompt_tokens,
    )


def _finish_reason(request: Request) -> tuple[FinishReason | None, int | None]:
    last = request.token_ids[-1]
    if request.num_output_tokens and last in request.sampling.stop_token_ids:
        return "stop", last
    if request.grammar is not None and request.grammar.is_complete and request.sampling.max_tokens > 0:
        return "stop", None
    if request.spec.pooling:
        return "stop", None
    if request.num_tokens >= request.max_num_tokens:
        return "length", None
    return None, None
