"""Every question becomes a prompt of its own, with one token and its labels as the answer."""

import asyncio
from typing import Any

import pytest

from server.api.decisions.plan import prepare_decisions
from server.api.decisions.request import DecisionRequest
from server.api.generation.plan import GenerationPlan, Intake
from server.errors import ApiError
from tests.server.api.fakes import FakeEngine, server_state

PREDICATE = {"type": "predicate", "instructions": "Is it?"}


def planned(*questions: dict[str, Any], max_model_len: int = 4096, **fields: Any) -> GenerationPlan:
    state = server_state(FakeEngine([], max_model_len))
    intake = Intake(state, state.require_loaded(), "id-1", state.admission.ticket(8))
    body = DecisionRequest.model_validate(
        {"input": "a", "questions": list(questions) or [PREDICATE], **fields}
    )
    return asyncio.run(prepare_decisions(intake, body))


def refused(*questions: dict[str, Any], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        planned(*questions, **fields)
    return error.value


def test_every_question_is_a_prompt_with_one_token() -> None:
    choice = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
    plan = planned(PREDICATE, choice)
    assert len(plan.prompts) == 2
    assert {prompt.sampling.max_tokens for prompt in plan.prompts} == {1}
    labels = [prompt.sampling.logprob_token_ids for prompt in plan.prompts]
    assert [len(found or ()) for found in labels] == [2, 2]
    common = zip(plan.prompts[0].token_ids, plan.prompts[1].token_ids, strict=False)
    assert sum(1 for one, other in common if one == other) > 3, "the input comes first, so that it is shared"


def test_streams_are_refused() -> None:
    assert refused(stream=True).param == "stream"


def test_options_belong_to_their_type() -> None:
    assert refused({"type": "choice", "instructions": "Which?"}).param == "questions[0].choices"
    levels = [{"label": "a"}, {"label": "b"}]
    assert refused(PREDICATE, {**PREDICATE, "levels": levels}).param == "questions[1].levels"


def test_a_question_that_does_not_fit_is_named() -> None:
    error = refused(PREDICATE, {**PREDICATE, "instructions": "a" * 300}, max_model_len=256)
    assert (error.param, error.code) == ("questions[1]", "context_length_exceeded")
