"""How the events of a run look on the wire: completions and chats have a form each. It turns events into the
choice objects of stream chunks; an answer in one piece is those pieces merged, so that both ways say the same
by construction. Pure: no I/O, no clock."""

from collections.abc import Iterable
from typing import Any, Protocol

from server.api.generation.run import ChoiceEvent

Choice = dict[str, Any]


class WireForm(Protocol):
    object_name: str  # of an answer in one piece
    chunk_object_name: str

    def pieces(self, event: ChoiceEvent) -> list[Choice]:
        """Choice objects to stream for an event; none while its text is held back."""
        ...

    def merged(self, pieces: Iterable[Choice]) -> Choice:
        """The pieces of one choice as the choice object of an answer in one piece."""
        ...

    def chunk_fields(self, piece: Choice) -> dict[str, Any]:
        """What stands beside the choices in the chunk of a piece."""
        ...

    def answer_fields(self) -> dict[str, Any]:
        """What stands beside the choices in an answer in one piece."""
        ...
