"""A choice's place in its grammar, see ``Grammar`` of the model. The next mask is computed in a pool of
threads as soon as the last token is known, so beside the model's next step; llguidance lets other threads run
meanwhile."""

from collections.abc import Iterable
from concurrent.futures import Executor, Future

from llguidance import LLMatcher

from model.interface.grammar_state import GrammarFault


class MatcherState:
    """Belongs to the engine's thread. The matcher is touched by one thread at a time: by the pool until the
    mask is there."""

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_id: int,
        end_token_ids: frozenset[int],
        first_mask: bytes,
        threads: Executor,
    ) -> None:
        self._matcher = matcher
        self._eos_token_id = eos_token_id
        self._end_token_ids = end_token_ids
        self._threads = threads
        self._mask: bytes | None = with_end_tokens(first_mask, eos_token_id, end_token_ids)
        self._pending: Future[bytes | None] | None = None
        self._is_complete = self._mask is None

    @property
    def is_complete(self) -> bool:
        return self._is_complete

    def mask(self) -> bytes | None:
        if self._pending is not None:
            self._mask = self._pending.result()
            self._pending = None
            self._is_complete = self._mask is None
        return self._mask

    def accept(self, token_id: int) -> None:
        assert self._pending is None, "a token was drawn without its mask"
        self._matcher.consume_token(token_id)
        self._is_complete = self._matcher.is_stopped() and not self._matcher.is_error()
        self._mask = None
        if not self._is_complete:
            self._pending = self._threads.submit(self._compute)

    def _compute(self) -> bytes | None:
        return with_end_tokens(compute_mask(self._matcher), self._eos_token_id, self._end_token_ids)


def compute_mask(matcher: LLMatcher) -> bytes:
    """What may come next, with the bit of the end of sequence where the grammar may end. Raises
    GrammarFault."""
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        reason = matcher.get_error().removesuffix("<non-verbose/>").strip()
        raise GrammarFault(f"The grammar could not be followed any further: {reason}")
    return mask


def with_end_tokens(mask: bytes, eos_token_id: int, end_token_ids: Iterable[int]) -> bytes | None:
    """The mask with the request's end tokens exactly where the grammar may end; None where it must."""
    bits = bytearray(mask)
    may_end = bool(bits[eos_token_id >> 3] >> (eos_token_id & 7) & 1)
    known = [token_id for token_id in end_token_ids if token_id < 8 * len(bits)]
    for token_id in (eos_token_id, *known):
        bits[token_id >> 3] &= ~(1 << (token_id & 7))
    if may_end:
        if bits.count(0) == len(bits):
            return None
        for token_id in known:
            bits[token_id >> 3] |= 1 << (token_id & 7)
    return bytes(bits)
