"""What a grammar means to engine and sampler: a mask before each draw, and news of the token drawn. No torch,
no text.

One state belongs to one choice of one request. It moves with the tokens and never back: a preempted request
keeps its tokens, and so its state.
"""

from typing import Protocol


class GrammarFault(Exception):  # noqa: N818
    """The grammar is too complex to be followed any further. Ends its own request; the text may be shown to
    the client."""


class GrammarState(Protocol):
    """The position of one choice in its grammar."""

    def mask(self) -> bytes | None:
        """Return the tokens that may come next, one bit per token id, the lowest bit of a byte first; ids
        beyond the mask's end may not come.

        End tokens are among them exactly where the grammar may end. None: it is complete and nothing may
        follow. May wait for a computation that the last ``accept`` started. Raises GrammarFault.
        """
        ...

    def accept(self, token_id: int) -> None:
        """Move on by a token of the last mask that is no end token. Never raises: a fault shows in the next
        ``mask``."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing but an end may follow."""
        ...


class Grammar(Protocol):
    """A compiled grammar."""

    def new_state(self, end_token_ids: frozenset[int]) -> GrammarState:
        """A state at the beginning. ``end_token_ids`` are the tokens that end the request."""
        ...
