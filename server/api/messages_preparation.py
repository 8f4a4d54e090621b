"""From a body of the Messages API to the plan of the chat that it is. Every refusal is an ApiError that names the field as the
client spelled it."""

from dataclasses import replace
from typing import Any

from server.admission import Ticket
from server.api.chat_schemas import ChatCompletionRequest
from server.api.generation_plan import GenerationPlan
from server.api.messages_schemas import CountTokensRequest, MessagesRequest, TextBlock
from server.api.preparation import prepare_chat
from server.api.prompts import chat_conversation, encode_chat
from server.engine.loaded import LoadedEngine
from server.errors import ApiError, invalid_request, model_not_found, unsupported_parameter
from server.state import ServerState

_SCHEMA_FIELDS = ("response_format.json_schema.schema", "output_config.format.schema")


async def prepare_messages(
    state: ServerState, loaded: LoadedEngine, body: MessagesRequest, response_id: str, ticket: Ticket
) -> GenerationPlan:
    _check(state, body)
    chat = ChatCompletionRequest.model_validate(
        {
            "model": body.model,
            "messages": _chat_messages(body),
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "seed": body.seed,
            "priority": body.priority,
            "continue_final_message": _continues(body) or None,
            "response_format": _response_format(body),
        }
    )
    try:
        plan = await prepare_chat(state, loaded, chat, response_id, ticket)
    except ApiError as error:
        raise _renamed(error) from None
    return replace(plan, stop=tuple(body.stop_sequences or ()))


async def count_tokens(state: ServerState, loaded: LoadedEngine, body: CountTokensRequest) -> int:
    """Tokens of the prompt that the same body would have in a request."""
    _check(state, body)
    if body.model is not None and body.model not in loaded.model_names:
        raise model_not_found(body.model)
    messages = ChatCompletionRequest.model_validate({"messages": _chat_messages(body)}).messages
    continues = _continues(body)
    token_ids = await encode_chat(
        state,
        loaded.tokenizer,
        chat_conversation(messages),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return len(token_ids)


def _check(state: ServerState, body: CountTokensRequest) -> None:
    if body.tools:
        raise unsupported_parameter("tools", "Use tools with /v1/chat/completions, or leave them out.")
    if body.tool_choice is not None and body.tool_choice.get("type") != "none":
        raise unsupported_parameter("tool_choice", "Use tools with /v1/chat/completions, or leave it out.")
    if body.thinking is not None and body.thinking.type not in ("disabled", "adaptive"):
        raise unsupported_parameter("thinking", 'The model does not think before it answers. Set it to {"type": "disabled"}.')
    _check_roles(body, strict=state.settings.strict_roles)


def _check_roles(body: CountTokensRequest, *, strict: bool) -> None:
    last: str | None = None
    for index, message in enumerate(body.messages):
        if message.role == "system":
            if strict and (index > 0 or body.system is not None):
                raise _wrong_role(index, "with strict roles only the first message may be a system message")
            continue
        if last is None and message.role == "assistant":
            raise _wrong_role(index, "the conversation must begin with a user message")
        if strict and message.role == last:
            raise _wrong_role(index, "with strict roles the turns must alternate between user and assistant")
        last = message.role


def _wrong_role(index: int, reason: str) -> ApiError:
    param = f"messages[{index}].role"
    return invalid_request(f"Invalid value for '{param}': {reason}.", param=param, code="invalid_value")


def _chat_messages(body: CountTokensRequest) -> list[Any]:
    messages = [] if body.system is None else [_message("system", body.system)]
    return messages + [_message(message.role, message.content) for message in body.messages]


def _message(role: str, blocks: list[TextBlock]) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": block.text} for block in blocks]}


def _continues(body: CountTokensRequest) -> bool:
    """The last message is the beginning of the answer."""
    return body.messages[-1].role == "assistant"


def _response_format(body: MessagesRequest) -> Any:
    wanted = None if body.output_config is None else body.output_config.format
    return None if wanted is None else {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}


def _renamed(error: ApiError) -> ApiError:
    """The error, if it names a field of chats that has another name here, under that name."""
    theirs, ours = _SCHEMA_FIELDS
    if error.param == theirs:
        error.message, error.param = error.message.replace(theirs, ours), ours
    return error
