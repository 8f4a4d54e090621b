"""Prompts of a request to token ids: text, ids and chats, encoded outside the event loop, and cut where the
request asks for it. Every refusal is an ApiError that names the field. Nothing here knows how tokens are
drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from anyio import to_thread

from server.api.generation.chat_messages import Message
from server.api.generation.tool_schemas import Tool
from server.errors import ApiError, invalid_request, invalid_value, missing_parameter
from server.state import ServerState
from server.text.template.conversation import ChatMessage, ChatTemplateError, merge_messages
from server.text.tokenizer import Tokenizer
from server.text.tool_calls.functions import Function, FunctionCall, functions_text

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    token_ids: list[int]
    text: str  # as echo shows it; empty where it is not needed


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a chat, the request fields that they came from, and the functions that the model is
    told of."""

    messages: Sequence[ChatMessage]
    names: Sequence[str]
    functions: Sequence[Function] = ()


async def in_thread(state: ServerState, work: Callable[[], Result]) -> Result:
    """Work on long texts, beside the event loop: a few at a time."""
    return await to_thread.run_sync(work, limiter=state.encoding_limiter)


def prompt_list(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str | list[int],
    *,
    limit: int | None,
    wants_text: bool,
    skip_special_tokens: bool,
    param: str = "prompt",
) -> EncodedPrompt:
    """Text gets one BOS; ids are used as they are. ``limit``: see ``truncated``."""
    if isinstance(prompt, str):
        token_ids = tokenizer.encode(prompt)
        kept = truncated(token_ids, limit, tokenizer.bos_token_id)
        if len(kept) == len(token_ids):
            return EncodedPrompt(kept, prompt)
        shown = kept[1:] if kept[0] == tokenizer.bos_token_id else kept
        return EncodedPrompt(kept, tokenizer.decode(shown, skip_special_tokens=False) if wants_text else "")
    check_token_ids(tokenizer, prompt, param)
    kept = truncated(prompt, limit, tokenizer.bos_token_id)
    return EncodedPrompt(
        kept, tokenizer.decode(kept, skip_special_tokens=skip_special_tokens) if wants_text else ""
    )


def truncated(token_ids: list[int], limit: int | None, bos_token_id: int) -> list[int]:
    """At most ``limit`` tokens: the last ones. A BOS in front stays there, for the model is lost without
    one."""
    if limit is None or len(token_ids) <= limit:
        return token_ids
    if token_ids[0] == bos_token_id and limit > 1:
        return [bos_token_id, *token_ids[1 - limit :]]
    return token_ids[-limit:]


async def encode_chat(
    state: ServerState,
    tokenizer: Tokenizer,
    conversation: Conversation,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    max_tokens: int | None = None,
) -> list[int]:
    """The rendered chat. It ends with the generation prompt, unless the last message is to be continued.
    Raises PromptTooLongError for what is certain to have more than ``max_tokens`` before it is encoded."""
    if continue_final_message:
        if add_generation_prompt:
            reason = "with 'continue_final_message' it must be false or left out"
            raise invalid_value("add_generation_prompt", reason)
        if conversation.messages[-1].role not in ("user", "assistant"):
            reason = "the last message must be one of role 'assistant' or 'user'"
            raise invalid_value("continue_final_message", reason)
    opens_turn = not continue_final_message and add_generation_prompt is not False
    strict = state.settings.strict_roles

    def encode() -> list[int]:
        instructions = functions_text(conversation.functions) if conversation.functions else ""
        merged = merge_messages(
            conversation.messages, strict, names=conversation.names, instructions=instructions
        )
        return tokenizer.encode_chat(merged, opens_turn, bool(continue_final_message), max_tokens=max_tokens)

    try:
        return await in_thread(state, encode)
    except ChatTemplateError as error:
        raise invalid_request(str(error), param=error.param, code="invalid_value") from None


def chat_functions(tools: Sequence[Tool] | None) -> list[Function]:
    return [
        Function(
            tool.function.name,
            tool.function.description,
            tool.function.parameters,
            f"tools[{index}].function.parameters",
        )
        for index, tool in enumerate(tools or ())
    ]


def chat_conversation(
    messages: Sequence[Message], functions: Sequence[Function] = (), names: Sequence[str] | None = None
) -> Conversation:
    """Messages as clients of chat completions send them. Raises ApiError for fields that do not go with the
    role."""
    names = [f"messages[{index}]" for index in range(len(messages))] if names is None else names
    return Conversation(
        [_chat_message(message, name) for message, name in zip(messages, names, strict=True)],
        names,
        functions,
    )


def _chat_message(message: Message, name: str) -> ChatMessage:
    if message.tool_calls and message.role != "assistant":
        raise _misplaced(f"{name}.tool_calls", "an assistant")
    if message.role == "tool" and message.tool_call_id is None:
        raise missing_parameter(f"{name}.tool_call_id")
    if message.tool_call_id is not None and message.role != "tool":
        raise _misplaced(f"{name}.tool_call_id", "role 'tool'")
    if message.content is None and not message.tool_calls:
        reason = f"a message of role '{message.role}' needs text"
        raise invalid_value(f"{name}.content", reason, code="invalid_type")
    parts = tuple(part.text for part in message.content or ())
    calls = tuple(
        FunctionCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    )
    return ChatMessage(
        message.role, "".join(parts) if len(parts) <= 1 else parts, calls, message.tool_call_id
    )


def _misplaced(param: str, owner: str) -> ApiError:
    return invalid_value(param, f"only a message of {owner} has it")


def check_token_ids(tokenizer: Tokenizer, token_ids: Sequence[int], param: str) -> None:
    """Raises ApiError unless every id has a token."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= tokenizer.num_known_tokens):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < tokenizer.num_known_tokens)
        raise unknown_token(param, wrong, tokenizer.num_known_tokens)


def unknown_token(param: str, token_id: int, num_tokens: int) -> ApiError:
    shown = str(token_id) if -(10**20) < token_id < 10**20 else "a huge integer"
    return invalid_value(param, f"token ids are 0 to {num_tokens - 1}, got {shown}")
