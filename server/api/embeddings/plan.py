"""From a checked body to a plan: an input is a request in the engine like any other, with a prompt and no
answer. It is admitted, queued, chunked, preempted and given up by the same rules, and runs in the same steps
as what generates. Every refusal is an ApiError that names the field."""

from functools import partial
from typing import Any

from model.interface.sampling_params import SamplingParams
from server.api.embeddings.request import EmbeddingRequest
from server.api.generation.plan import GenerationPlan, Intake, PromptPlan
from server.api.generation.priority import checked_priority
from server.api.generation.prompts import encode_prompt, in_thread, prompt_list
from server.errors import check_model, context_length_exceeded, invalid_value, unsupported_parameter
from server.loading.load import LoadedEngine


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
