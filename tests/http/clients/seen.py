"""An answer as a client hands it on, in one piece or in chunks, read alike: what each choice says, joined
over its chunks."""

from dataclasses import dataclass
from typing import Any

from tests.http.clients.adapters import CHAT

ENTRIES = {"chat": ("content",), "legacy": ("tokens", "token_logprobs", "top_logprobs", "text_offset")}


@dataclass(frozen=True)
class Seen:
    kind: str
    streamed: bool
    chunks: list[dict[str, Any]]  # of an answer in one piece: the answer

    @property
    def usage(self) -> dict[str, Any]:
        usage = self.chunks[-1]["usage"]
        assert isinstance(usage, dict)
        return usage

    @property
    def indices(self) -> list[int]:
        """In the order in which they first came."""
        return list(dict.fromkeys(choice["index"] for chunk in self.chunks for choice in chunk["choices"]))

    def pieces(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def messages(self, index: int = 0) -> list[dict[str, Any]]:
        return [piece["delta" if self.streamed else "message"] for piece in self.pieces(index)]

    def text(self, index: int = 0) -> str:
        if self.kind == CHAT:
            return "".join(message.get("content") or "" for message in self.messages(index))
        return "".join(piece["text"] or "" for piece in self.pieces(index))

    def reason(self, index: int = 0) -> str | None:
        reason: str | None = self.pieces(index)[-1]["finish_reason"]
        return reason

    def calls(self, index: int = 0) -> list[list[str]]:
        """[name, arguments] of each call."""
        calls: list[list[str]] = []
        for message in self.messages(index) if self.kind == CHAT else ():
            for place, piece in enumerate(message.get("tool_calls") or ()):
                function = piece["function"]
                if piece.get("index", place) == len(calls):
                    assert piece["id"].startswith("call_")
                    calls.append([function["name"], function["arguments"] or ""])
                else:
                    calls[piece["index"]][1] += function["arguments"] or ""
        return calls

    def logprobs(self, index: int = 0) -> dict[str, list[Any]] | None:
        found = [piece["logprobs"] for piece in self.pieces(index) if piece.get("logprobs")]
        names = ENTRIES["chat" if self.kind == CHAT else "legacy"]
        return (
            {name: [entry for part in found for entry in part[name] or ()] for name in names}
            if found
            else None
        )

    def says(self) -> dict[str, Any]:
        """What must be the same through every client, streamed or not."""
        choices = {
            index: [self.text(index), self.reason(index), self.calls(index), self.logprobs(index)]
            for index in self.indices
        }
        return {
            "choices": dict(sorted(choices.items())),
            "tokens": [self.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")],
            "model": self.chunks[0]["model"],
        }
