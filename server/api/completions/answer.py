"""How the events of a run look on the wire. A form turns events into the choice objects of stream chunks; an
answer in one piece is those pieces merged, so that both ways say the same by construction. Pure: no I/O, no
clock."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from server.api.choices.wire_forms import Choice
from server.api.completions.request import CompletionRequest
from server.api.generation.plan import GenerationPlan
from server.api.generation.run import ChoiceEvent
from server.api.generation.token_text import LegacyLogprobs, empty_legacy, prompt_entries, token_namer
from server.text.tokenizer import Tokenizer


class CompletionForm:
    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, plan: GenerationPlan, body: CompletionRequest) -> None:
        self._tokenizer = tokenizer
        self._name = token_namer(tokenizer, bool(body.return_tokens_as_token_ids))
        self._plan = plan
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        self._prompts_are_text = isinstance(body.prompt, str) or isinstance(body.prompt[0], str)
        self._return_token_ids = bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self._started: set[int] = set()
        self._writers: dict[int, LegacyLogprobs] = {}
        self._scored_prompts: dict[int, list[dict[str, Any] | None]] = {}

    def pieces(self, event: ChoiceEvent) -> list[Choice]:
        text, logprobs = event.text, None
        prompt = self._plan.prompts[event.index // self._plan.n]
        if self._echo and event.is_first:
            text = prompt.text + text
        if self._logprobs is not None:
            logprobs = self._lists(event, self._logprobs)
        if self._prompt_logprobs is not None and event.is_first:
            self._scored_prompts[event.index] = prompt_entries(
                self._tokenizer, event.prompt_logprobs or (), self._prompt_logprobs
            )
        pieces = []
        if (
            text
            or (logprobs is not None and logprobs["tokens"])
            or (self._return_token_ids and event.token_ids)
        ):
            pieces.append(self._piece(event.index, text, logprobs, event.token_ids, None))
        if event.finish_reason is not None:
            end = None if self._logprobs is None else empty_legacy()
            pieces.append(self._piece(event.index, "", end, (), event.finish_reason))
        if pieces and self._return_token_ids and event.index not in self._started:
            self._started.add(event.index)
            pieces[0]["prompt_token_ids"] = prompt.token_ids
        return pieces

    def _piece(
        self,
        index: int,
        text: str,
        logprobs: Mapping[str, Any] | None,
        token_ids: Sequence[int],
        finish_reason: str | None,
    ) -> Choice:
        piece: Choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if self._return_token_ids:
            piece["token_ids"] = list(token_ids)
        return piece

    def _lists(self, event: ChoiceEvent, num_top: int) -> dict[str, Any]:
        prompt = self._plan.prompts[event.index // self._plan.n]
        lists = empty_legacy()
        if event.is_first:
            skipped = (
                self._tokenizer.skipped_token_ids if self._plan.skip_special_tokens else frozenset[int]()
            )
            writer = self._writers[event.index] = LegacyLogprobs(
                self._tokenizer, self._name, num_top, skipped
            )
            if self._echo:
                lists = writer.prompt(
                    prompt.token_ids, event.prompt_logprobs or (), prompt.text, self._prompts_are_text
                )
            else:
                writer.skip_prompt(prompt.text)
        generated = self._writers[event.index].generated(event.logprobs, self._plan.shows_labels)
        return {name: lists[name] + generated[name] for name in lists}

    def merged(self, pieces: Iterable[Choice]) -> Choice:
        pieces = list(pieces)
        index = pieces[0]["index"]
        token_ids = [token_id for piece in pieces for token_id in piece.get("token_ids", ())]
        merged = self._piece(
            index, "".join(piece["text"] for piece in pieces), None, token_ids, pieces[-1]["finish_reason"]
        )
        if self._logprobs is not None:
            merged["logprobs"] = {
                name: [item for piece in pieces for item in piece["logprobs"][name]]
                for name in pieces[0]["logprobs"]
            }
        if self._return_token_ids:
            merged["prompt_token_ids"] = pieces[0]["prompt_token_ids"]
        if self._prompt_logprobs is not None:
            merged["prompt_logprobs"] = self._scored_prompts[index]
        return merged

    def chunk_fields(self, piece: Choice) -> dict[str, Any]:
        return {}

    def answer_fields(self) -> dict[str, Any]:
        return {}
