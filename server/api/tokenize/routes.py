"""GET /tokenizer_info, POST /tokenize and POST /detokenize, at the root where scoring tools look for them.
What they say is what the generation endpoints do: the same encoding, the same chat template. Texts are
encoded and answers written in a worker thread.
"""

from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from server.admission import BodyTicket
from server.api.description import answers, request_body
from server.api.generation.prompts import (
    chat_conversation,
    chat_functions,
    check_token_ids,
    encode_chat,
    in_thread,
)
from server.api.generation.tools import check_schemas, tool_use
from server.api.generation.validation import ParsedRequest, parse_request, read_json_object
from server.api.tokenize.request import DetokenizeRequest, TokenizeRequest
from server.errors import check_model, invalid_value, missing_parameter
from server.http.context import state_of
from server.http.json_response import JsonResponse
from server.loading.load import LoadedEngine
from server.state import ServerState
from server.text.tokenizer import Tokenizer

Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)


class TokenizerInfo(TypedDict):
    bos_token: str
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str


def tokenizer_info(tokenizer: Tokenizer, max_model_len: int) -> TokenizerInfo:
    """Under the names of a tokenizer_config.json; a token that the vocabulary lacks is null."""

    def written(literal: str) -> str | None:
        return None if tokenizer.control_token_id(literal) is None else literal

    eos = tokenizer.eos_token_ids
    return {
        "bos_token": tokenizer.token_text(tokenizer.bos_token_id),
        "eos_token": tokenizer.token_text(eos[0]) if eos else None,
        "pad_token": written("<pad>"),
        "unk_token": written("<unk>"),
        "add_bos_token": True,
        "model_max_length": max_model_len,
        "chat_template": tokenizer.chat_template_source,
    }


async def _tokenize(
    state: ServerState, loaded: LoadedEngine, parsed: ParsedRequest[TokenizeRequest]
) -> Response:
    body, tokenizer = parsed.body, loaded.tokenizer
    if body.messages is not None:
        # What a chat refuses is refused here, and what it shows the model by default is shown.
        use = tool_use(chat_functions(body.tools), None, None)
        if use is not None:
            await check_schemas(loaded, use.functions)
        token_ids = await encode_chat(
            state,
            tokenizer,
            chat_conversation(body.messages, () if use is None else use.shown),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )
    else:
        prompt, adds_bos = body.prompt or "", body.add_special_tokens is not False
        token_ids = await in_thread(state, lambda: tokenizer.encode(prompt, adds_bos))

    def answer() -> Response:
        content: TokenizeResponse = {
            "count": len(token_ids),
            "max_model_len": loaded.engine.limits.max_model_len,
            "tokens": token_ids,
            "token_strs": [tokenizer.token_text(token_id) for token_id in token_ids]
            if body.return_token_strs
            else None,
        }
        return JsonResponse(content, headers=parsed.headers())

    return await in_thread(state, answer)


def _check_source(body: TokenizeRequest) -> None:
    if body.prompt is None and body.messages is None:
        raise missing_parameter("prompt", " (or 'messages')")
    if body.prompt is not None:
        others = ("messages", "add_generation_prompt", "continue_final_message", "tools")
        surplus = next((name for name in others if getattr(body, name) is not None), None)
        if surplus is not None:
            reason = "it does not go with 'prompt'; send one of 'prompt' and 'messages'"
            raise invalid_value(surplus, reason)


async def _read(
    request: Request, model: type[Body], held: BodyTicket
) -> tuple[LoadedEngine, ParsedRequest[Body]]:
    state = state_of(request)
    loaded = state.require_loaded()
    value = await read_json_object(request, held, state.settings.read_timeout or None)
    parsed = parse_request(model, value, strict_params=state.settings.strict_params)
    check_model(parsed.body.model, loaded.model_names)
    return loaded, parsed


def create_router() -> APIRouter:
    router = APIRouter()

    @router.get("/tokenizer_info", responses=answers(TokenizerInfo))
    async def show_tokenizer(request: Request) -> Response:
        """The tokens that begin and end a text, and the chat template in force."""
        loaded = state_of(request).require_loaded()
        return JsonResponse(tokenizer_info(loaded.tokenizer, loaded.engine.limits.max_model_len))

    @router.post(
        "/tokenize",
        responses=answers(TokenizeResponse, takes_body=True),
        openapi_extra=request_body(TokenizeRequest),
    )
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt or a chat, as the generation endpoints see it."""
        state = state_of(request)
        with state.admission.body() as held:
            loaded, parsed = await _read(request, TokenizeRequest, held)
            _check_source(parsed.body)
            with state.admission.text_work():
                return await _tokenize(state, loaded, parsed)

    @router.post(
        "/detokenize",
        responses=answers(DetokenizeResponse, takes_body=True),
        openapi_extra=request_body(DetokenizeRequest),
    )
    async def detokenize(request: Request) -> Response:
        """The text of tokens, control tokens as their literals."""
        state = state_of(request)
        with state.admission.body() as held:
            loaded, parsed = await _read(request, DetokenizeRequest, held)
            tokenizer, tokens = loaded.tokenizer, parsed.body.tokens

            def answer() -> Response:
                check_token_ids(tokenizer, tokens, "tokens")
                content: DetokenizeResponse = {"prompt": tokenizer.decode(tokens, skip_special_tokens=False)}
                return JsonResponse(content, headers=parsed.headers())

            with state.admission.text_work():
                return await in_thread(state, answer)

    return router
