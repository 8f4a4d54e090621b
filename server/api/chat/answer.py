"""What a run looks like as a chat: the objects of its answer, and what writes them. Pure: no I/O, no
clock."""

import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from server.api.chat.request import ChatCompletionRequest
from server.api.choices.answer import (
    BodyTimings,
    ChoiceAnswer,
    ChunkEnd,
    ChunkTimings,
    ChunkUsage,
    ScoredPrompt,
    TokenIds,
)
from server.api.generation.plan import GenerationPlan
from server.api.generation.run import ChoiceEvent, ChoiceFinish, Usage, UsageSchema
from server.api.generation.token_text import (
    ChatTokenLogprob,
    PromptLogprobs,
    chat_entry,
    prompt_entries,
    token_namer,
)
from server.api.generation.wire_values import ResponseHead, optional
from server.text.tokenizer import Tokenizer
from server.text.tool_calls.call_parser import Part

with_first_piece = partial(optional, description="With the first piece of a call.")


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob] | None
    refusal: None


class CalledFunctionSchema(TypedDict):
    name: str
    arguments: str


class ToolCallSchema(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunctionSchema


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[
        Annotated[list[ToolCallSchema], Field(description="Where functions were called.")]
    ]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: NotRequired[TokenIds]


class ChatCompletionResponse(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageSchema
    timings: NotRequired[BodyTimings]
    prompt_token_ids: NotRequired[TokenIds]
    prompt_logprobs: NotRequired[ScoredPrompt]


class FunctionDelta(TypedDict):
    name: NotRequired[Annotated[str, with_first_piece("")]]
    arguments: str


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[Annotated[str, with_first_piece("")]]
    type: NotRequired[Annotated[Literal["function"], with_first_piece("function")]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    role: NotRequired[
        Annotated[Literal["assistant"], optional("assistant", "In the first chunk of a choice.")]
    ]
    content: NotRequired[Annotated[str | None, optional(None)]]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None
    token_ids: NotRequired[TokenIds]


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[ChunkUsage]
    timings: NotRequired[ChunkTimings]
    prompt_token_ids: NotRequired[TokenIds]


class _PromptIds(TypedDict, total=False):
    prompt_token_ids: list[int]


class _ScoredPrompt(TypedDict, total=False):
    prompt_logprobs: PromptLogprobs


class ChatAnswer(ChoiceAnswer[ChatChunkChoice]):
    def __init__(
        self, tokenizer: Tokenizer, plan: GenerationPlan, body: ChatCompletionRequest, head: ResponseHead
    ) -> None:
        super().__init__(plan, head, body.stream_options)
        self._tokenizer = tokenizer
        self._name = token_namer(tokenizer, bool(body.return_tokens_as_token_ids))
        self._shows_logprobs = bool(body.logprobs)
        self._top_logprobs = body.top_logprobs or 0
        self._return_token_ids = bool(body.return_token_ids)
        self._prompt_logprobs = body.prompt_logprobs
        self._scored_prompt: PromptLogprobs = []
        self._started: set[int] = set()

    def pieces(self, event: ChoiceEvent) -> list[ChatChunkChoice]:
        """The role comes with the first piece, not before it: clients take the first chunk for the first
        token."""
        entries = None
        if self._shows_logprobs:
            num_top = None if self.plan.shows_labels else self._top_logprobs
            entries = [chat_entry(self._tokenizer, self._name, token, num_top) for token in event.logprobs]
        if self._prompt_logprobs is not None and event.is_first:
            self._scored_prompt = prompt_entries(
                self._tokenizer, event.prompt_logprobs or (), self._prompt_logprobs
            )
        deltas = [_delta(part) for part in event.parts]
        if not deltas and (entries or (self._return_token_ids and event.token_ids)):
            # Nothing was said in these tokens: plain text of no characters, or what may become a call.
            deltas = [{"content": ""} if self.plan.calls is None else {}]
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
            role: ChatDelta = {
                "role": "assistant",
                "content": "" if self._begins_as_text(pieces[0]) else None,
            }
            pieces.insert(0, self._piece(event.index, role, None, (), None))
        return pieces

    def _begins_as_text(self, first: ChatChunkChoice) -> bool:
        """A text that begins, or ends before it began, is announced as empty text; calls come without any."""
        calls = self.plan.calls
        return (
            calls is None
            or "content" in first["delta"]
            or (first["finish_reason"] is not None and not calls.is_forced)
        )

    def _piece(
        self,
        index: int,
        delta: ChatDelta,
        entries: list[ChatTokenLogprob] | None,
        token_ids: Sequence[int],
        finish_reason: ChoiceFinish | None,
    ) -> ChatChunkChoice:
        logprobs: ChatLogprobs | None = None if entries is None else {"content": entries, "refusal": None}
        piece: ChatChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if self._return_token_ids:
            piece["token_ids"] = list(token_ids)
        return piece

    def merged(self, index: int, pieces: Sequence[ChatChunkChoice]) -> ChatChoice:
        """The pieces of one choice as the choice object of an answer in one piece."""
        deltas = [piece["delta"] for piece in pieces]
        texts = [content for delta in deltas if (content := delta.get("content")) is not None]
        message: AssistantMessage = {"role": "assistant", "content": None, "refusal": None}
        calls = _merged_calls(call for delta in deltas for call in delta.get("tool_calls", ()))
        if texts:
            message["content"] = "".join(texts)
        if calls:
            message["tool_calls"] = calls
        logprobs: ChatLogprobs | None = None
        if self._shows_logprobs:
            entries = [
                entry for piece in pieces if piece["logprobs"] for entry in piece["logprobs"]["content"] or ()
            ]
            logprobs = {"content": entries, "refusal": None}
        finish_reason = pieces[-1]["finish_reason"]
        assert finish_reason is not None, "a choice is merged when it has ended"
        merged: ChatChoice = {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        if self._return_token_ids:
            merged["token_ids"] = [token_id for piece in pieces for token_id in piece["token_ids"]]
        return merged

    def chunk(self, choices: list[ChatChunkChoice], end: ChunkEnd) -> ChatCompletionChunk:
        """The tokens of the prompt stand beside the choices, once for each: with its role."""
        return {
            "id": self.head.id,
            "object": "chat.completion.chunk",
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": self.head.system_fingerprint,
            "choices": choices,
            **self._prompt_ids(is_shown=bool(choices) and "role" in choices[0]["delta"]),
            **end,
        }

    def body(self, usage: Usage) -> ChatCompletionResponse:
        scored: _ScoredPrompt = {}
        if self._prompt_logprobs is not None:
            scored["prompt_logprobs"] = self._scored_prompt
        return {
            "id": self.head.id,
            "object": "chat.completion",
            "created": self.head.created,
            "model": self.head.model,
            "system_fingerprint": self.head.system_fingerprint,
            "choices": [self.merged(index, pieces) for index, pieces in enumerate(self.returned())],
            **self._prompt_ids(is_shown=True),
            **scored,
            "usage": usage.wire(),
            **self.body_end(usage),
        }

    def _prompt_ids(self, *, is_shown: bool) -> _PromptIds:
        if not (is_shown and self._return_token_ids):
            return {}
        return {"prompt_token_ids": self.plan.prompts[0].token_ids}


def _delta(part: Part) -> ChatDelta:
    if isinstance(part, str):
        return {"content": part}
    if part.name is None:
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}
    begun: ToolCallDelta = {
        "index": part.index,
        "id": f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }
    return {"tool_calls": [begun]}


def _merged_calls(pieces: Iterable[ToolCallDelta]) -> list[ToolCallSchema]:
    """The calls of a message from the pieces of its stream."""
    calls: list[ToolCallSchema] = []
    for piece in pieces:
        function = piece["function"]
        if piece["index"] == len(calls):
            called: CalledFunctionSchema = {"name": function["name"], "arguments": function["arguments"]}
            calls.append({"id": piece["id"], "type": piece["type"], "function": called})
        else:
            calls[piece["index"]]["function"]["arguments"] += function["arguments"]
    return calls
