"""What a run looks like as a completion: the objects of its answer, and what writes them. Pure: no I/O, no
clock."""

from collections.abc import Sequence
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from server.api.choices.answer import (
    BodyTimings,
    ChoiceAnswer,
    ChunkEnd,
    ChunkTimings,
    ChunkUsage,
    ScoredPrompt,
    TokenIds,
)
from server.api.completions.request import CompletionRequest
from server.api.generation.plan import GenerationPlan
from server.api.generation.run import ChoiceEvent, Usage, UsageSchema
from server.api.generation.token_text import (
    LegacyLogprobs,
    LegacyLogprobsSchema,
    PromptLogprobs,
    joined_legacy,
    prompt_entries,
    token_namer,
)
from server.api.generation.wire_values import ResponseHead
from server.engine.request import FinishReason
from server.text.tokenizer import Tokenizer


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobsSchema | None
    finish_reason: Literal["stop", "length"]
    token_ids: NotRequired[TokenIds]
    prompt_token_ids: NotRequired[TokenIds]
    prompt_logprobs: NotRequired[ScoredPrompt]


class CompletionResponse(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageSchema
    timings: NotRequired[BodyTimings]


class CompletionChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: LegacyLogprobsSchema | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: NotRequired[TokenIds]
    prompt_token_ids: NotRequired[TokenIds]


class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[ChunkUsage]
    timings: NotRequired[ChunkTimings]


class CompletionAnswer(ChoiceAnswer[CompletionChunkChoice]):
    def __init__(
        self, tokenizer: Tokenizer, plan: GenerationPlan, body: CompletionRequest, head: ResponseHead
    ) -> None:
        super().__init__(plan, head, body.stream_options)
        self._tokenizer = tokenizer
        self._name = token_namer(tokenizer, bool(body.return_tokens_as_token_ids))
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        self._prompts_are_text = isinstance(body.prompt, str) or isinstance(body.prompt[0], str)
        self._return_token_ids = bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self._started: set[int] = set()
        self._writers: dict[int, LegacyLogprobs] = {}
        self._scored_prompts: dict[int, PromptLogprobs] = {}

    def pieces(self, event: ChoiceEvent) -> list[CompletionChunkChoice]:
        text, logprobs = event.text, None
        prompt = self.plan.prompts[event.index // self.plan.n]
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
            assert event.finish_reason != "tool_calls", "a completion knows no functions"
            end = None if self._logprobs is None else joined_legacy([])
            pieces.append(self._piece(event.index, "", end, (), event.finish_reason))
        if pieces and self._return_token_ids and event.index not in self._started:
            self._started.add(event.index)
            pieces[0]["prompt_token_ids"] = prompt.token_ids
        return pieces

    def _piece(
        self,
        index: int,
        text: str,
        logprobs: LegacyLogprobsSchema | None,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None,
    ) -> CompletionChunkChoice:
        piece: CompletionChunkChoice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if self._return_token_ids:
            piece["token_ids"] = list(token_ids)
        return piece

    def _lists(self, event: ChoiceEvent, num_top: int) -> LegacyLogprobsSchema:
        prompt = self.plan.prompts[event.index // self.plan.n]
        lists = joined_legacy([])
        if event.is_first:
            skipped = self._tokenizer.skipped_token_ids if self.plan.skip_special_tokens else frozenset[int]()
            writer = self._writers[event.index] = LegacyLogprobs(
                self._tokenizer, self._name, num_top, skipped
            )
            if self._echo:
                lists = writer.prompt(
                    prompt.token_ids, event.prompt_logprobs or (), prompt.text, self._prompts_are_text
                )
            else:
                writer.skip_prompt(prompt.text)
        generated = self._writers[event.index].generated(event.logprobs, self.plan.shows_labels)
        return joined_legacy([lists, generated])

    def merged(self, index: int, pieces: Sequence[CompletionChunkChoice]) -> CompletionChoice:
        """The pieces of one choice as the choice object of an answer in one piece."""
        finish_reason = pieces[-1]["finish_reason"]
        assert finish_reason is not None, "a choice is merged when it has ended"
        merged: CompletionChoice = {
            "index": index,
            "text": "".join(piece["text"] for piece in pieces),
            "logprobs": None,
            "finish_reason": finish_reason,
        }
        if self._logprobs is not None:
            merged["logprobs"] = joined_legacy(
                [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
            )
        if self._return_token_ids:
            merged["token_ids"] = [token_id for piece in pieces for token_id in piece["token_ids"]]
            merged["prompt_token_ids"] = pieces[0]["prompt_token_ids"]
        if self._prompt_logprobs is not None:
            merged["prompt_logprobs"] = self._scored_prompts[pieces[0]["index"]]
        return merged

    def chunk(self, choices: list[CompletionChunkChoice], end: ChunkEnd) -> CompletionChunk:
        return {
            "id": self.head.id,
            "object": "text_completion",
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": self.head.system_fingerprint,
            "choices": choices,
            **end,
        }

    def body(self, usage: Usage) -> CompletionResponse:
        return {
            "id": self.head.id,
            "object": "text_completion",
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": self.head.system_fingerprint,
            "choices": [self.merged(index, pieces) for index, pieces in enumerate(self.returned())],
            "usage": usage.wire(),
            **self.body_end(usage),
        }
