"""From prompts to a plan: what has room, what is cut, what is refused, and which settings choices get."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from server.admission import Ticket
from server.api.completions.request import CompletionRequest
from server.api.generation.plan import AnswerTerms, GenerationPlan, Intake
from server.api.generation.planning import (
    MAX_SEQUENCES,
    check_common,
    check_num_sequences,
    least_num_tokens,
    make_plan,
    truncation,
)
from server.api.generation.prompts import EncodedPrompt, truncated
from server.api.generation.sampling import stop_token_ids
from server.errors import ApiError
from server.loading.load import LoadedEngine
from server.settings.settings import Settings
from server.state import ServerState
from tests.server.text.small_tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
LIMIT = 20


def intake(**settings: Any) -> Intake:
    limits = SimpleNamespace(max_model_len=LIMIT)
    loaded = SimpleNamespace(
        tokenizer=TOKENIZER, engine=SimpleNamespace(limits=limits), model_names=["tiny", "other"]
    )
    state = SimpleNamespace(settings=Settings(**settings), effective_default=lambda name, default: default)
    return Intake(cast(ServerState, state), cast(LoadedEngine, loaded), "id-1", cast(Ticket, None))


def body(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "a", **fields})


def planned(
    num_prompt_tokens: int, terms: AnswerTerms, given: Intake | None = None, **fields: Any
) -> GenerationPlan:
    prompt = EncodedPrompt([2] * num_prompt_tokens, "")
    return make_plan(given or intake(), body(**fields), [prompt], terms)


def test_max_tokens_is_lowered_to_the_room_that_the_prompt_leaves() -> None:
    assert planned(15, AnswerTerms("prompt", 100)).prompts[0].sampling.max_tokens == 5
    assert planned(15, AnswerTerms("prompt", 3)).prompts[0].sampling.max_tokens == 3
    assert planned(15, AnswerTerms("prompt", None, 4)).prompts[0].sampling.max_tokens == 4
    assert planned(15, AnswerTerms("prompt", None)).prompts[0].sampling.max_tokens == 5


def test_a_prompt_without_room_is_refused_and_its_field_named() -> None:
    with pytest.raises(ApiError, match="maximum context length is 20 tokens") as refused:
        planned(20, AnswerTerms("input", None))
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
    assert planned(20, AnswerTerms("input", 0)).prompts[0].sampling.max_tokens == 0


def test_strict_context_refuses_what_is_lowered_else() -> None:
    with pytest.raises(ApiError) as refused:
        planned(15, AnswerTerms("prompt", 6), intake(strict_context=True))
    assert refused.value.code == "context_length_exceeded"
    assert planned(15, AnswerTerms("prompt", 5), intake(strict_context=True)).num_sequences == 1


def test_min_tokens_may_not_be_above_max_tokens() -> None:
    with pytest.raises(ApiError, match="expected at most max_tokens = 3, got 4") as refused:
        planned(5, AnswerTerms("prompt", 3), min_tokens=4)
    assert (refused.value.param, refused.value.code) == ("min_tokens", "integer_above_max_value")


def test_terms_reach_the_plan() -> None:
    terms = AnswerTerms("prompt", 3, n=4, num_best=2, stop=["x"], logprobs=1, shows_timings=True)
    plan = planned(5, terms, seed=7, temperature=0.5)
    assert (plan.n, plan.num_best, plan.stop, plan.shows_timings) == (4, 2, ("x",), True)
    assert (plan.prompts[0].sampling.seed, plan.prompts[0].sampling.logprobs) == (7, 1)
    assert plan.num_sequences == 4
    assert planned(5, terms, temperature=0).num_sequences == 1, "equal choices are computed once"


def test_more_sequences_than_the_limit_name_the_field_that_multiplies() -> None:
    check_num_sequences(MAX_SEQUENCES, 1, "prompt", "n")
    with pytest.raises(ApiError) as refused:
        check_num_sequences(MAX_SEQUENCES, 2, "prompt", "n")
    assert refused.value.param == "n"
    with pytest.raises(ApiError) as refused:
        check_num_sequences(MAX_SEQUENCES + 1, 1, "prompt", "n")
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop_token_ids", [10**6]), ("logit_bias", {"1000000": 1.0}), ("allowed_token_ids", [10**6])],
)
def test_ids_beyond_the_vocabulary_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ApiError, match="token ids are 0 to") as refused:
        check_common(intake().loaded, body(**{field: value}))
    assert refused.value.param == field


def test_an_unknown_model_is_404_and_none_is_what_there_is() -> None:
    check_common(intake().loaded, body())
    check_common(intake().loaded, body(model="other"))
    with pytest.raises(ApiError, match="`nobody` does not exist") as refused:
        check_common(intake().loaded, body(model="nobody"))
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded() -> None:
    loaded = intake().loaded
    assert least_num_tokens(loaded, [[1, 2, 3], [4]], None, None) == 4
    assert least_num_tokens(loaded, [[1, 2, 3], [4]], 2, None) == 3
    with pytest.raises(ApiError, match="at least") as refused:
        least_num_tokens(loaded, ["z" * 10_000], None, None)
    assert refused.value.code == "context_length_exceeded"


def test_minus_one_cuts_to_the_room_beside_the_answer() -> None:
    loaded = intake().loaded
    assert truncation(loaded, body(), 5, 16) is None
    assert truncation(loaded, body(truncate_prompt_tokens=7), 5, 16) == 7
    assert truncation(loaded, body(truncate_prompt_tokens=-1), 5, 16) == LIMIT - 5
    assert truncation(loaded, body(truncate_prompt_tokens=-1), None, 16) == LIMIT - 16
    assert truncation(loaded, body(truncate_prompt_tokens=-1), 100, 16) == 1


def test_what_is_cut_keeps_the_beginning_of_sequence() -> None:
    assert truncated([2, 5, 6, 7], 3, 2) == [2, 6, 7]
    assert truncated([5, 6, 7], 2, 2) == [6, 7]
    assert truncated([2, 5, 6], 1, 2) == [6]
    assert truncated([2, 5], 5, 2) == [2, 5]


def test_ignore_eos_leaves_the_requests_own_stop_tokens() -> None:
    own = stop_token_ids(TOKENIZER, body(stop_token_ids=[20], ignore_eos=True))
    assert own == {20}
    assert stop_token_ids(TOKENIZER, body(stop_token_ids=[20])) == {20} | set(TOKENIZER.eos_token_ids)
