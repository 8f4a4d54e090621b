"""Answers of completions and chats: an envelope around the choices that a wire form writes."""

from dataclasses import dataclass
from typing import Any

from server.api.choices.best_of import ChoiceRanking
from server.api.choices.wire_forms import Choice, WireForm
from server.api.generation.plan import GenerationPlan
from server.api.generation.request import StreamOptions
from server.api.generation.run import ChoiceEvent, Usage
from server.api.generation.wire_values import ResponseHead
from server.errors import ApiError
from server.http.json_response import encode_json

DONE = b"data: [DONE]\n\n"


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


class ChoiceAnswer:
    def __init__(
        self, plan: GenerationPlan, form: WireForm, head: ResponseHead, stream_usage: StreamUsage
    ) -> None:
        self._form = form
        self._head = head
        self._stream_usage = stream_usage
        self._shows_timings = plan.shows_timings
        self._pieces: dict[int, list[Choice]] = {}
        self._ranking = ChoiceRanking(plan)

    def chunks(self, event: ChoiceEvent, usage: Usage) -> bytes:
        pieces = self._form.pieces(event)
        return b"".join(
            self._chunk([piece], usage, is_last=usage.is_over and piece is pieces[-1]) for piece in pieces
        )

    def end(self, usage: Usage) -> bytes:
        return (self._chunk([], usage) if self._stream_usage.include else b"") + DONE

    def failure(self, error: ApiError, usage: Usage) -> bytes:
        return b"data: " + encode_json(error.body()) + b"\n\n" + DONE

    def collect(self, event: ChoiceEvent) -> None:
        self._ranking.observe(event)
        self._pieces.setdefault(event.index, []).extend(self._form.pieces(event))

    def collected(self, usage: Usage) -> dict[str, Any]:
        returned = enumerate(self._ranking.returned())
        choices = [{**self._form.merged(self._pieces[chosen]), "index": index} for index, chosen in returned]
        body = self._envelope(self._form.object_name, choices) | self._form.answer_fields()
        body["usage"] = usage.wire()
        if self._shows_timings:
            body["timings"] = usage.phases.wire()
        return body

    def _chunk(self, choices: list[Choice], usage: Usage, is_last: bool = False) -> bytes:
        """``is_last``: after it, no choice has more to say."""
        chunk = self._envelope(self._form.chunk_object_name, choices)
        for piece in choices:
            chunk |= self._form.chunk_fields(piece)
        if self._stream_usage.include:
            chunk["usage"] = usage.wire() if self._stream_usage.continuous or not choices else None
        if is_last and self._shows_timings:
            chunk["timings"] = usage.phases.wire()
        return b"data: " + encode_json(chunk) + b"\n\n"

    def _envelope(self, object_name: str, choices: list[Choice]) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": object_name,
            "created": self._head.created,
            "model": self._head.model,
            "system_fingerprint": self._head.system_fingerprint,
            "choices": choices,
        }
