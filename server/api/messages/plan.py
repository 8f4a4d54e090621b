"""From a body of the Messages API to the plan of the chat that it is. Every refusal is an ApiError that names
the field as the client spelled it."""

from typing import Any

from server.api.chat.plan import prepare_chat
from server.api.chat.request import ChatCompletionRequest
from server.api.generation.plan import GenerationPlan, Intake
from server.api.generation.prompts import chat_conversation, chat_functions, encode_chat
from server.api.generation.tools import check_schemas, tool_use
from server.api.messages.input import chat_messages
from server.api.messages.request import CountTokensRequest, MessagesRequest, MessagesToolChoice
from server.errors import ApiError, check_model, invalid_value, missing_parameter, unsupported_parameter
from server.loading.load import LoadedEngine
from server.state import ServerState

# What a chat calls it, and what it is called here.
_FIELDS = (
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("function.parameters", "input_schema"),
    ("function.name", "name"),
)


async def prepare_messages(intake: Intake, body: MessagesRequest) -> GenerationPlan:
    _check(intake.state, body)
    chat, names = _chat(
        body,
        model=body.model,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        priority=body.priority,
        continue_final_message=_continues(body) or None,
        response_format=_response_format(body),
    )
    try:
        return await prepare_chat(intake, chat, names=names, stop=body.stop_sequences or ())
    except ApiError as error:
        raise _renamed(error) from None


async def count_tokens(state: ServerState, loaded: LoadedEngine, body: CountTokensRequest) -> int:
    """Tokens of the prompt that the same body would have in a request."""
    _check(state, body)
    check_model(body.model, loaded.model_names)
    chat, names = _chat(body)
    try:
        use = tool_use(chat_functions(chat.tools), chat.tool_choice, chat.parallel_tool_calls)
        if use is not None:
            await check_schemas(loaded, use.functions)
    except ApiError as error:
        raise _renamed(error) from None
    continues = _continues(body)
    token_ids = await encode_chat(
        state,
        loaded.tokenizer,
        chat_conversation(chat.messages, () if use is None else use.shown, names),
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )
    return len(token_ids)


def _check(state: ServerState, body: CountTokensRequest) -> None:
    if body.thinking is not None and body.thinking.type not in ("disabled", "adaptive"):
        raise unsupported_parameter(
            "thinking", 'The model does not think before it answers. Set it to {"type": "disabled"}.'
        )
    choice = body.tool_choice
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise missing_parameter("tool_choice.name")
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
    return invalid_value(f"messages[{index}].role", reason)


def _chat(body: CountTokensRequest, **fields: Any) -> tuple[ChatCompletionRequest, list[str]]:
    """The same request in the words of chat completions, and the fields that its messages come from."""
    messages, names = chat_messages(body)
    tools = [
        _chat_tool(tool.name, tool.description, _without_nulls(tool.input_schema))
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    chat = ChatCompletionRequest.model_validate(
        {
            "messages": messages,
            "tools": tools or None,
            "tool_choice": None if choice is None else _chat_choice(choice),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            **fields,
        }
    )
    return chat, names


def _chat_tool(name: str, description: str | None, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def _without_nulls(schema: dict[str, Any]) -> dict[str, Any]:
    """Anthropic's clients may send null for what an input schema leaves out, which is no JSON schema."""
    return {
        name: value
        for name, value in schema.items()
        if value is not None or name not in ("properties", "required")
    }


def _chat_choice(choice: MessagesToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _continues(body: CountTokensRequest) -> bool:
    """The last message is the beginning of the answer."""
    return body.messages[-1].role == "assistant"


def _response_format(body: MessagesRequest) -> Any:
    wanted = None if body.output_config is None else body.output_config.format
    return None if wanted is None else {"type": "json_schema", "json_schema": {"schema": wanted.schema_}}


def _renamed(error: ApiError) -> ApiError:
    """The error, if it names a field of chats that has another name here, under that name."""
    param = error.param
    if param is not None:
        for theirs, ours in _FIELDS:
            param = param.replace(theirs, ours)
        error.message, error.param = error.message.replace(error.param or "", param), param
    return error
