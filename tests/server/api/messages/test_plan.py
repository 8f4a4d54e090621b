"""A message is planned as the chat that it is; refusals name the fields that the client knows."""

import asyncio
from typing import Any

import pytest

from server.api.generation.plan import GenerationPlan, Intake
from server.api.messages.plan import count_tokens, prepare_messages
from server.api.messages.request import CountTokensRequest, MessagesRequest
from server.errors import ApiError
from tests.server.api.fakes import FakeEngine, server_state
from tests.server.text.small_tokenizer import build_tokenizer

USER: dict[str, Any] = {"role": "user", "content": "a"}
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": None}}


def planned(*messages: dict[str, Any], strict_roles: bool = False, **fields: Any) -> GenerationPlan:
    state = server_state(FakeEngine([], max_model_len=4096), strict_roles=strict_roles)
    intake = Intake(state, state.require_loaded(), "id-1", state.admission.ticket(8))
    body = MessagesRequest.model_validate({"messages": list(messages) or [USER], "max_tokens": 3, **fields})
    return asyncio.run(prepare_messages(intake, body))


def refused(*messages: dict[str, Any], **fields: Any) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as error:
        planned(*messages, **fields)
    return error.value.param, error.value.message


def test_fields_reach_the_plan() -> None:
    plan = planned(stop_sequences=["x"], temperature=0.0, top_k=3, seed=7)
    sampling = plan.prompts[0].sampling
    assert (plan.stop, plan.n) == (("x",), 1)
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (3, 0.0, 3, 7)


def test_the_beginning_of_an_answer_is_continued() -> None:
    begun = planned(USER, {"role": "assistant", "content": "b"}).prompts[0].token_ids
    assert build_tokenizer().decode(begun, skip_special_tokens=False).endswith("b")


def test_counting_counts_what_a_request_would_compute() -> None:
    state = server_state(FakeEngine([], max_model_len=4096))
    for fields in ({}, {"system": "be brief"}, {"tools": [TOOL]}):
        body = CountTokensRequest.model_validate({"messages": [USER], **fields})
        count = asyncio.run(count_tokens(state, state.require_loaded(), body))
        assert count == planned(**fields).num_prompt_tokens


def test_thinking_is_refused_unless_it_is_off() -> None:
    assert planned(thinking={"type": "disabled"}).n == 1
    assert refused(thinking={"type": "enabled", "budget_tokens": 1024})[0] == "thinking"


def test_a_named_tool_needs_its_name() -> None:
    assert refused(tools=[TOOL], tool_choice={"type": "tool"})[0] == "tool_choice.name"


def test_a_conversation_begins_with_the_user() -> None:
    param, text = refused({"role": "assistant", "content": "b"}, USER)
    assert param == "messages[0].role"
    assert "begin with a user message" in text


def test_strict_roles_alternate_and_have_one_system_message() -> None:
    assert planned(USER, USER).num_prompt_tokens > 0
    assert refused(USER, USER, strict_roles=True)[0] == "messages[1].role"
    system = {"role": "system", "content": "a"}
    assert refused(USER, system, USER, strict_roles=True)[0] == "messages[1].role"


def test_a_fault_of_a_schema_is_told_in_the_words_of_this_api() -> None:
    tool = {"name": "add", "input_schema": {"type": "nonsense"}}
    param, text = refused(tools=[tool], tool_choice={"type": "any"})
    assert param == "tools[0].input_schema.type"
    assert "function.parameters" not in text
