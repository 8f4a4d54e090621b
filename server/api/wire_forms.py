"""How the events of a run look on the wire: one form per endpoint. A form turns events into the choice objects of stream chunks;
an answer in one piece is those pieces merged, so that both ways say the same by construction. Pure: no I/O, no clock."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from server.api.generation import ChoiceEvent, GenerationPlan
from server.api.token_text import LegacyLogprobs, chat_entry, empty_legacy
from server.text.tokenizer import Tokenizer

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


class CompletionForm:
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, plan: GenerationPlan, *, echo: bool, logprobs: int | None, prompts_are_text: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._plan = plan
        self._echo = echo
        self._logprobs = logprobs
        self._prompts_are_text = prompts_are_text
        self._writers: dict[int, LegacyLogprobs] = {}

    def pieces(self, event: ChoiceEvent) -> list[Choice]:
        text, logprobs = event.text, None
        if self._echo and event.is_first:
            text = self._plan.prompts[event.index // self._plan.n].text + text
        if self._logprobs is not None:
            logprobs = self._lists(event, self._logprobs)
        pieces = []
        if text or (logprobs is not None and logprobs["tokens"]):
            pieces.append(self._piece(event.index, text, logprobs, None))
        if event.finish_reason is not None:
            end = None if self._logprobs is None else empty_legacy()
            pieces.append(self._piece(event.index, "", end, event.finish_reason))
        return pieces

    def _piece(self, index: int, text: str, logprobs: Mapping[str, Any] | None, finish_reason: str | None) -> Choice:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _lists(self, event: ChoiceEvent, num_top: int) -> dict[str, Any]:
        prompt = self._plan.prompts[event.index // self._plan.n]
        lists = empty_legacy()
        if event.is_first:
            writer = self._writers[event.index] = LegacyLogprobs(self._tokenizer, num_top)
            if self._echo:
                lists = writer.prompt(prompt.token_ids, event.prompt_logprobs or (), prompt.text, self._prompts_are_text)
            else:
                writer.skip_prompt(prompt.text)
        generated = self._writers[event.index].generated(event.logprobs)
        return {name: lists[name] + generated[name] for name in lists}

    def merged(self, pieces: Iterable[Choice]) -> Choice:
        pieces = list(pieces)
        merged = self._piece(pieces[0]["index"], "".join(piece["text"] for piece in pieces), None, pieces[-1]["finish_reason"])
        if self._logprobs is not None:
            merged["logprobs"] = {
                name: [item for piece in pieces for item in piece["logprobs"][name]] for name in pieces[0]["logprobs"]
            }
        return merged


class ChatForm:
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, *, top_logprobs: int | None) -> None:
        self._tokenizer = tokenizer
        self._top_logprobs = top_logprobs  # None: no log-probabilities
        self._started: set[int] = set()

    def pieces(self, event: ChoiceEvent) -> list[Choice]:
        """The role comes with the first piece, not before it: clients take the first chunk for the first token."""
        entries = None
        if self._top_logprobs is not None:
            entries = [chat_entry(self._tokenizer, token, self._top_logprobs) for token in event.logprobs]
        pieces = []
        if event.text or entries:
            pieces.append(self._piece(event.index, {"content": event.text}, entries, None))
        if event.finish_reason is not None:
            pieces.append(self._piece(event.index, {}, None, event.finish_reason))
        if pieces and event.index not in self._started:
            self._started.add(event.index)
            pieces.insert(0, self._piece(event.index, {"role": "assistant", "content": ""}, None, None))
        return pieces

    def _piece(
        self, index: int, delta: dict[str, Any], entries: list[dict[str, Any]] | None, finish_reason: str | None
    ) -> Choice:
        logprobs = None if entries is None else {"content": entries, "refusal": None}
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def merged(self, pieces: Iterable[Choice]) -> Choice:
        pieces = list(pieces)
        content = "".join(piece["delta"].get("content", "") for piece in pieces)
        logprobs = None
        if self._top_logprobs is not None:
            entries = [entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"]]
            logprobs = {"content": entries, "refusal": None}
        return {
            "index": pieces[0]["index"],
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": pieces[-1]["finish_reason"],
        }
