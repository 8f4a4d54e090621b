"""What the answers of completions and chats share. Both are made of pieces, the choice objects of stream
chunks: an answer in one piece is those pieces merged, so that a stream and a body say the same by
construction."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from pydantic import Field
from typing_extensions import TypedDict

from server.api.choices.best_of import ChoiceRanking
from server.api.generation.answer import StreamedAnswer
from server.api.generation.plan import GenerationPlan
from server.api.generation.request import StreamOptions
from server.api.generation.run import ChoiceEvent, Usage, UsageSchema
from server.api.generation.token_text import PromptLogprobs
from server.api.generation.wire_values import ResponseHead, optional
from server.errors import ApiError
from server.http.json_response import encode_json
from server.observability.request_metrics import Timings

DONE = b"data: [DONE]\n\n"
Piece = TypeVar("Piece")

TokenIds = Annotated[list[int], Field(description="With return_token_ids.")]
ScoredPrompt = Annotated[PromptLogprobs, Field(description="With prompt_logprobs.")]
BodyTimings = Annotated[Timings | None, optional(None, "With return_timings.")]
ChunkUsage = Annotated[
    UsageSchema | None, optional(None, "With stream_options.include_usage; null except in the last chunk.")
]
ChunkTimings = Annotated[
    Timings | None, optional(None, "With return_timings, in the last chunk of the choices.")
]


class ChunkEnd(TypedDict, total=False):
    """What stands behind the choices of a chunk, where it was asked for."""

    usage: UsageSchema | None
    timings: Timings


class BodyEnd(TypedDict, total=False):
    timings: Timings


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """``include``: one more chunk with the usage, and null on all others; ``continuous``: the usage so far on
    every one."""

    include: bool = False
    continuous: bool = False

    @classmethod
    def of(cls, options: StreamOptions | None) -> "StreamUsage":
        if options is None or not options.include_usage:
            return cls()
        return cls(include=True, continuous=bool(options.continuous_usage_stats))


class ChoiceAnswer(StreamedAnswer, Generic[Piece]):
    """Subclasses write the pieces of each choice, and the objects around them."""

    def __init__(self, plan: GenerationPlan, head: ResponseHead, options: StreamOptions | None) -> None:
        self.plan = plan
        self.head = head
        self._stream_usage = StreamUsage.of(options)
        self._pieces: dict[int, list[Piece]] = {}
        self._ranking = ChoiceRanking(plan)

    @abstractmethod
    def pieces(self, event: ChoiceEvent) -> list[Piece]:
        """Choice objects to stream for an event; none while its text is held back."""

    @abstractmethod
    def chunk(self, choices: list[Piece], end: ChunkEnd) -> object:
        """The data of one event of a stream, with one piece or none."""

    def chunks(self, event: ChoiceEvent, usage: Usage) -> bytes:
        pieces = self.pieces(event)
        return b"".join(
            self._written([piece], usage, is_last=usage.is_over and piece is pieces[-1]) for piece in pieces
        )

    def end(self, usage: Usage) -> bytes:
        return (self._written([], usage) if self._stream_usage.include else b"") + DONE

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        return b"data: " + encode_json(error.body()) + b"\n\n" + DONE

    def collect(self, event: ChoiceEvent) -> None:
        self._ranking.observe(event)
        self._pieces.setdefault(event.index, []).extend(self.pieces(event))

    def returned(self) -> list[list[Piece]]:
        """The pieces of each choice that is returned, in the order of the answer."""
        return [self._pieces[index] for index in self._ranking.returned()]

    def body_end(self, usage: Usage) -> BodyEnd:
        return {"timings": usage.phases.wire()} if self.plan.shows_timings else {}

    def _written(self, choices: list[Piece], usage: Usage, is_last: bool = False) -> bytes:
        """``is_last``: after it, no choice has more to say."""
        end: ChunkEnd = {}
        if self._stream_usage.include:
            end["usage"] = usage.wire() if self._stream_usage.continuous or not choices else None
        if is_last and self.plan.shows_timings:
            end["timings"] = usage.phases.wire()
        return b"data: " + encode_json(self.chunk(choices, end)) + b"\n\n"
