"""How the events of a run look on the wire. A form turns events into the choice objects of stream chunks; an
answer in one piece is those pieces merged, so that both ways say the same by construction. Pure: no I/O, no
clock."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from server.api.chat.request import ChatCompletionRequest
from server.api.choices.wire_forms import Choice
from server.api.generation.plan import GenerationPlan
from server.api.generation.run import ChoiceEvent
from server.api.generation.token_text import chat_entry, prompt_entries, token_namer
from server.text.tokenizer import Tokenizer
from server.text.tool_calls.call_parser import Part


class ChatForm:
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, plan: GenerationPlan, body: ChatCompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._name = token_namer(tokenizer, bool(body.return_tokens_as_token_ids))
        self._plan = plan
        self._shows_logprobs = bool(body.logprobs)
        self._top_logprobs = body.top_logprobs or 0
        self._return_token_ids = bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self._scored_prompt: list[dict[str, Any] | None] = []
        self._started: set[int] = set()

    def pieces(self, event: ChoiceEvent) -> list[Choice]:
        """The role comes with the first piece, not before it: clients take the first chunk for the first
        token."""
        entries = None
        if self._shows_logprobs:
            num_top = None if self._plan.shows_labels else self._top_logprobs
            entries = [chat_entry(self._tokenizer, self._name, token, num_top) for token in event.logprobs]
        if self._prompt_logprobs is not None and event.is_first:
            self._scored_prompt = prompt_entries(
                self._tokenizer, event.prompt_logprobs or (), self._prompt_logprobs
            )
        deltas = [_delta(part) for part in event.parts]
        if not deltas and (entries or (self._return_token_ids and event.token_ids)):
            # Nothing was said in these tokens: plain text of no characters, or what may become a call.
            deltas = [{"content": ""} if self._plan.calls is None else {}]
        pieces = []
        for position, delta in enumerate(deltas):
            first = position == 0  # carries what belongs to the tokens
            pieces.append(
                self._piece(
                    event.index, delta, entries if first else None, event.token_ids if first else (), None
                )
            )
        if event.finish_reason is not None:
            pieces.append(self._piece(event.index, {}, None, (), event.finish_reason))
        if pieces and event.index not in self._started:
            self._started.add(event.index)
            role = {"role": "assistant", "content": "" if self._begins_as_text(pieces[0]) else None}
            pieces.insert(0, self._piece(event.index, role, None, (), None))
        return pieces

    def _begins_as_text(self, first: Choice) -> bool:
        """A text that begins, or ends before it began, is announced as empty text; calls come without any."""
        calls = self._plan.calls
        return (
            calls is None
            or "content" in first["delta"]
            or (first["finish_reason"] is not None and not calls.is_forced)
        )

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        entries: list[dict[str, Any]] | None,
        token_ids: Sequence[int],
        finish_reason: str | None,
    ) -> Choice:
        logprobs = None if entries is None else {"content": entries, "refusal": None}
        piece: Choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._return_token_ids:
            piece["token_ids"] = list(token_ids)
        return piece

    def merged(self, pieces: Iterable[Choice]) -> Choice:
        pieces = list(pieces)
        deltas = [piece["delta"] for piece in pieces]
        texts = [delta["content"] for delta in deltas if delta.get("content") is not None]
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        calls = _merged_calls(call for delta in deltas for call in delta.get("tool_calls", ()))
        if texts:
            message["content"] = "".join(texts)
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self._shows_logprobs:
            entries = [
                entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]
            ]
            logprobs = {"content": entries, "refusal": None}
        merged: Choice = {
            "index": pieces[0]["index"],
            "message": message,
            "logprobs": logprobs,
            "finish_reason": pieces[-1]["finish_reason"],
        }
        if self._return_token_ids:
            merged["token_ids"] = [token_id for piece in pieces for token_id in piece["token_ids"]]
        return merged

    def chunk_fields(self, piece: Choice) -> dict[str, Any]:
        """The one prompt of a chat stands beside its choices; in a stream once per choice, with the role."""
        return self._prompt_ids() if "role" in piece["delta"] else {}

    def answer_fields(self) -> dict[str, Any]:
        scored = {} if self._prompt_logprobs is None else {"prompt_logprobs": self._scored_prompt}
        return {**self._prompt_ids(), **scored}

    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._plan.prompts[0].token_ids} if self._return_token_ids else {}


def _delta(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"content": part}
    if part.name is None:
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}
    function = {"name": part.name, "arguments": part.arguments}
    return {
        "tool_calls": [
            {"index": part.index, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        ]
    }


def _merged_calls(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a message from the pieces of its stream."""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        function = piece["function"]
        if piece["index"] == len(calls):
            calls.append({"id": piece["id"], "type": piece["type"], "function": dict(function)})
        else:
            calls[piece["index"]]["function"]["arguments"] += function["arguments"]
    return calls
