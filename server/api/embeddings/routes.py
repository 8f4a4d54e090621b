"""POST /v1/embeddings: the mean of the final hidden states of each input, over all of its tokens, scaled to
length 1.

An input is a request in the engine like any other, with a prompt and no answer: it is admitted, queued,
chunked, preempted and given up by the same rules, and runs in the same steps as what generates.
"""

import base64
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from model.interface.sampling_params import SamplingParams
from server.api.generation.endpoint import GenerationEndpoint, Headers
from server.api.generation.plan import GenerationPlan, Intake, PromptPlan
from server.api.generation.priority import checked_priority
from server.api.generation.prompts import encode_prompt, in_thread, prompt_list
from server.api.generation.request import GenerationBody, Truncation, check_prompts, prompt_schema
from server.api.generation.run import GenerationRun
from server.api.generation.wire_values import ResponseHead
from server.api.schemas.answers import EmbeddingsResponse
from server.api.schemas.description import answers, request_body
from server.errors import check_model, context_length_exceeded, invalid_value, unsupported_parameter
from server.http.json_response import encode_json
from server.loading.load import LoadedEngine

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_INPUTS = 2048


def _check_input(value: object) -> object:
    return check_prompts(value, MAX_INPUTS)


class EmbeddingRequest(GenerationBody):
    input: Annotated[Any, BeforeValidator(_check_input), prompt_schema(MAX_INPUTS, min_length=1)] = Field(
        description="Text gets one beginning-of-sequence token; token ids are used as they are."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: of float32, little-endian."
    )
    dimensions: int | None = Field(None, description="Only the model's own.")
    truncate_prompt_tokens: Truncation | None = Field(
        None,
        description="Keep this many tokens at an input's end (-1: what fits), "
        "and a beginning-of-sequence token in front.",
    )
    user: Annotated[str, Field(max_length=512)] | None = None


async def prepare_embeddings(intake: Intake, body: EmbeddingRequest) -> GenerationPlan:
    state, loaded = intake.state, intake.loaded
    check_model(body.model, loaded.model_names)
    if body.stream:
        raise unsupported_parameter("stream", "Leave it out.")
    size = loaded.hidden_size
    if body.dimensions is not None and body.dimensions != size:
        message = (
            f"Embeddings of this model have {size} dimensions and lose their meaning when they are "
            "cut. Leave it out."
        )
        raise unsupported_parameter("dimensions", message)
    priority = checked_priority(state.settings, body.priority)
    inputs = prompt_list(body.input)
    for index, text in enumerate(inputs):
        if text == "":
            param = f"input[{index}]" if isinstance(body.input, list) else "input"
            raise invalid_value(param, "the text is empty", code="empty_string")
    max_model_len, limit = loaded.engine.limits.max_model_len, body.truncate_prompt_tokens
    limit = max_model_len if limit == -1 else limit
    intake.ticket.admit(len(inputs), _least_num_tokens(loaded, inputs, limit))
    encode = partial(
        encode_prompt,
        loaded.tokenizer,
        limit=limit,
        wants_text=False,
        skip_special_tokens=True,
        param="input",
    )
    encoded = await in_thread(state, lambda: [encode(prompt).token_ids for prompt in inputs])
    longest = max(map(len, encoded))
    if longest > max_model_len:
        raise context_length_exceeded(max_model_len, longest, 0, "input")
    nothing = SamplingParams(max_tokens=0, temperature=0.0)
    prompts = tuple(PromptPlan(token_ids, nothing, "") for token_ids in encoded)
    return GenerationPlan(intake.response_id, prompts, n=1, stop=(), priority=priority, pooling=True)


def _least_num_tokens(loaded: LoadedEngine, inputs: Any, limit: int | None) -> int:
    """A lower bound of the tokens of all inputs, before anything is encoded. Raises ApiError when a text
    cannot fit."""
    total = 0
    for item in inputs:
        least = loaded.tokenizer.least_num_tokens(item) if isinstance(item, str) else len(item)
        if limit is None and least > loaded.engine.limits.max_model_len:
            raise context_length_exceeded(
                loaded.engine.limits.max_model_len, least, 0, "input", is_bound=isinstance(item, str)
            )
        total += least if limit is None else min(least, limit)
    return total


def normalised(mean: "npt.NDArray[np.float64]") -> "npt.NDArray[np.float32]":
    """[h], of length 1; zeros stay zeros."""
    length = float(np.linalg.norm(mean))
    return (mean / length if length else mean).astype("<f4")


def _item(index: int, embedding: "npt.NDArray[np.float32]", as_base64: bool) -> bytes:
    """One at a time: as Python numbers all of them would take many times the memory."""
    value = base64.b64encode(embedding.tobytes()).decode() if as_base64 else embedding.tolist()
    return encode_json({"object": "embedding", "index": index, "embedding": value})


class EmbeddingsEndpoint(GenerationEndpoint[EmbeddingRequest]):
    """Streams are refused before anything is computed."""

    name, id_prefix, body_type = "embeddings", "embd-", EmbeddingRequest

    async def plan(self, intake: Intake, body: EmbeddingRequest) -> GenerationPlan:
        return await prepare_embeddings(intake, body)

    async def respond(
        self, intake: Intake, run: GenerationRun, body: EmbeddingRequest, head: ResponseHead, headers: Headers
    ) -> Response:
        embeddings: dict[int, npt.NDArray[np.float32]] = {}
        while (event := await run.next_event()) is not None:
            assert event.mean_hidden is not None
            embeddings[event.index] = normalised(event.mean_hidden)
        used = {"prompt_tokens": run.usage.prompt_tokens, "total_tokens": run.usage.prompt_tokens}

        def written() -> bytes:
            as_base64 = body.encoding_format == "base64"
            items = b",".join(_item(index, embeddings[index], as_base64) for index in range(len(embeddings)))
            rest = encode_json({"object": "list", "model": head.model, "usage": used})
            return rest[:-1] + b',"data":[' + items + b"]}"

        return Response(
            await in_thread(intake.state, written), headers={"content-type": "application/json", **headers}
        )


def create_router() -> APIRouter:
    router = APIRouter()
    embeddings = EmbeddingsEndpoint()

    @router.post(
        "/v1/embeddings",
        responses=answers(EmbeddingsResponse, takes_body=True, computes=True),
        openapi_extra=request_body("EmbeddingRequest", computes=True),
        summary="The meaning of texts as vectors",
    )
    async def create_embeddings(request: Request) -> Response:
        return await embeddings.handle(request)

    return router
