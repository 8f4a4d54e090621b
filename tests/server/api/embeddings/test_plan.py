"""An input is a prompt without an answer; what cannot be one is named."""

import asyncio
from typing import Any

import pytest

from server.api.embeddings.plan import prepare_embeddings
from server.api.embeddings.request import EmbeddingRequest
from server.api.generation.plan import GenerationPlan, Intake
from server.errors import ApiError
from tests.server.api.fakes import FakeEngine, server_state


def planned(given: Any, max_model_len: int = 16, **fields: Any) -> GenerationPlan:
    state = server_state(FakeEngine([], max_model_len))
    intake = Intake(state, state.require_loaded(), "id-1", state.admission.ticket(8))
    return asyncio.run(
        prepare_embeddings(intake, EmbeddingRequest.model_validate({"input": given, **fields}))
    )


def refused(given: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        planned(given, **fields)
    return error.value


def test_inputs_pool_and_draw_nothing() -> None:
    plan = planned(["a", "b"])
    assert plan.pooling
    assert {prompt.sampling.max_tokens for prompt in plan.prompts} == {0}
    assert [len(prompt.token_ids) for prompt in plan.prompts] == [2, 2]
    assert planned([5, 6]).prompts[0].token_ids == [5, 6]


@pytest.mark.parametrize(
    ("given", "fields", "param"),
    [
        ("a", {"stream": True}, "stream"),
        ("a", {"dimensions": 2}, "dimensions"),
        ("", {}, "input"),
        (["a", ""], {}, "input[1]"),
        ([3] * 17, {}, "input"),
        ("a", {"model": "nobody"}, "model"),
        ([10**6], {}, "input"),
    ],
)
def test_what_is_refused_names_its_field(given: Any, fields: dict[str, Any], param: str) -> None:
    assert (refused(given, **fields).param or "").startswith(param)


def test_a_long_input_is_cut_where_it_is_asked_for() -> None:
    plan = planned([3] * 40, truncate_prompt_tokens=-1)
    assert plan.num_prompt_tokens == 16
    assert planned([3] * 40, truncate_prompt_tokens=4).num_prompt_tokens == 4
