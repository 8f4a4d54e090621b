"""From a checked body to a plan: every question is a prompt of its own with one token as its answer, so that
it is admitted, queued, batched and given up like any other; what they share is computed once by way of the
prefix cache. Every refusal is an ApiError that names the field."""

from functools import partial

from model.interface.sampling_params import SamplingParams
from server.api.decisions.questions import AskedQuestion, Labels, asked
from server.api.decisions.request import DecisionRequest, num_characters
from server.api.generation.plan import GenerationPlan, Intake, PromptPlan
from server.api.generation.priority import checked_priority
from server.api.generation.prompts import Conversation, encode_chat
from server.api.generation.validation import MAX_BODY_BYTES
from server.api.responses.input import item_messages
from server.errors import check_model, context_length_exceeded, invalid_value, unsupported_parameter
from server.loading.load import LoadedEngine
from server.state import ServerState
from server.text.length_bound import PromptTooLongError
from server.text.template.conversation import ChatMessage


async def prepare_decisions(intake: Intake, body: DecisionRequest) -> GenerationPlan:
    state, loaded = intake.state, intake.loaded
    check_model(body.model, loaded.model_names)
    if body.stream:
        raise unsupported_parameter("stream", "Leave it out.")
    priority = checked_priority(state.settings, body.priority)
    if len(body.questions) * num_characters(body.input) > MAX_BODY_BYTES:
        reason = "so many of them about so long an input are too much; ask fewer at once"
        raise invalid_value("questions", reason, code="array_above_max_length")
    questions = _asked(loaded, body)
    messages, names = item_messages(body.input)
    intake.ticket.admit(len(questions), 0)
    prompts = []
    for index, question in enumerate(questions):
        # The question ends the last turn of the input, or is the turn behind it.
        turns = [*messages, ChatMessage("user", question.text)]
        token_ids = await _encode(
            state, loaded, Conversation(turns, [*names, names[-1]]), f"questions[{index}]"
        )
        prompts.append(PromptPlan(token_ids, _sampling(question), ""))
    return GenerationPlan(intake.response_id, tuple(prompts), n=1, stop=(), priority=priority)


def _asked(loaded: LoadedEngine, body: DecisionRequest) -> list[AskedQuestion]:
    labels = Labels(loaded.tokenizer)
    return [asked(question, labels, f"questions[{index}]") for index, question in enumerate(body.questions)]


def _sampling(question: AskedQuestion) -> SamplingParams:
    return SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=question.labels)


async def _encode(
    state: ServerState, loaded: LoadedEngine, conversation: Conversation, param: str
) -> list[int]:
    limit = loaded.engine.limits.max_model_len
    too_long = partial(context_length_exceeded, limit, num_completion_tokens=1, param=param)
    try:
        token_ids = await encode_chat(
            state,
            loaded.tokenizer,
            conversation,
            add_generation_prompt=True,
            continue_final_message=None,
            max_tokens=limit,
        )
    except PromptTooLongError as error:
        raise too_long(error.num_tokens, is_bound=True) from None
    if len(token_ids) + 1 > limit:
        raise too_long(len(token_ids))
    return token_ids
