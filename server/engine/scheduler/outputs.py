"""What a result of the model adds to its request, and whether it ends it: the output that the client gets.
Imports no torch."""

from collections.abc import Callable

from model.interface.sequence_chunk import ChunkResult
from server.engine.request import FinishReason, Request, TokenOutput


def append_result(request: Request, result: ChunkResult, clock: Callable[[], float]) -> TokenOutput:
    """Give a request the tokens of a result without an error. The output says whether the request has
    ended."""
    request.token_ids.extend(result.token_ids)
    if request.grammar is not None:
        for token_id in result.token_ids:
            if (
                token_id not in request.sampling.stop_token_ids
            ):  # these end the request, and the grammar lets them
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
    if request.spec.pools:
        return "stop", None
    if request.num_tokens >= request.max_num_tokens:
        return "length", None
    return None, None
