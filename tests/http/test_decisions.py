"""/v1/decisions over raw HTTP and through OpenAI's client: the model's own distribution over the options of
typed questions."""

import math
from typing import Any

import openai
import pytest

from server.api.decisions.questions import Labels
from tests.fakes import fake_tokenizer
from tests.http.live_server import LiveServer
from tests.http.test_streams import CHAT

DECISIONS = "/v1/decisions"
INPUT = "Charged twice for one month."
PREDICATE = {"type": "predicate", "name": "refund", "instructions": "The customer wants money back."}
CHOICE: dict[str, Any] = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "billing"}, {"value": True, "description": "a yes"}, {"value": "true"}],
}
SCORE: dict[str, Any] = {
    "type": "score",
    "name": "urgency",
    "instructions": "How urgent?",
    "levels": [{"label": "low"}, {"label": "middle"}, {"label": "high", "description": "now"}],
}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
HIDDEN = {"type": "refusal", "refusal": "a" * 50_000, "text": "a"}
EMPTY = {"type": "input_text", "text": ""}
LABELS = Labels(fake_tokenizer())


def decide(server: LiveServer, questions: list[Any], **fields: Any) -> dict[str, Any]:
    response = server.post(DECISIONS, {"input": INPUT, "questions": questions, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def expected(
    server: LiveServer, text: str, labels: list[int], before: list[dict[str, Any]] | None = None
) -> list[float]:
    """The distribution over labels at the first token of the chat that asks the same."""
    messages = [*(before or [{"role": "user", "content": INPUT}]), {"role": "user", "content": text}]
    body = {
        "messages": messages,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": True,
        "logprob_token_ids": labels,
    }
    entry = server.chat(**body)["choices"][0]["logprobs"]["content"][0]
    weights = [math.exp(item["logprob"]) for item in entry["top_logprobs"]]
    assert len(weights) == len(labels)
    return [weight / sum(weights) for weight in weights]


def ids(*texts: str) -> list[int]:
    found = [LABELS.token_of(text) for text in texts]
    return [token_id for token_id in found if token_id is not None]


def test_answers_are_the_models_distribution_over_the_options(server: LiveServer) -> None:
    predicate, choice, score = decide(server, [PREDICATE, CHOICE, SCORE])["answers"]
    text = "The customer wants money back.\n\nIs this true? Answer with Y or N, and nothing else."
    assert predicate == {
        "type": "predicate",
        "name": "refund",
        "probability": pytest.approx(expected(server, text, ids("Y", "N"))[0], abs=1e-9),
    }
    text = (
        "Which team?\n\nWhich of these is right? Answer with its label, and nothing else.\nA: billing\n"
        "B: true (a yes)\nC: true"
    )
    found = expected(server, text, ids("A", "B", "C"))
    assert [item["value"] for item in choice["probabilities"]] == ["billing", True, "true"]
    assert [item["probability"] for item in choice["probabilities"]] == pytest.approx(found, abs=1e-9)
    best = max(range(3), key=lambda index: found[index])
    assert (choice["type"], choice["name"], choice["choice"]) == (
        "choice",
        None,
        ["billing", True, "true"][best],
    )
    assert choice["confidence"] == pytest.approx(found[best], abs=1e-9)
    text = (
        "How urgent?\n\nWhich of these levels is right? They go from the lowest to the highest. "
        "Answer with its label, and nothing else.\nA: low\nB: middle\nC: high (now)"
    )
    found = expected(server, text, ids("A", "B", "C"))
    assert [(item["label"], item["value"]) for item in score["probabilities"]] == [
        ("low", 0),
        ("middle", 1),
        ("high", 2),
    ]
    assert score["score"] == pytest.approx(found[1] + 2 * found[2], abs=1e-9)
    assert score["confidence"] == pytest.approx(max(found), abs=1e-9)
    assert score["name"] == "urgency"


def test_answers_come_in_the_order_of_the_questions_and_do_not_depend_on_each_other(
    server: LiveServer,
) -> None:
    questions = [PREDICATE, SCORE, CHOICE, SCORE, PREDICATE] * 4
    together = decide(server, questions)["answers"]
    alone = [decide(server, [question])["answers"][0] for question in (PREDICATE, SCORE, CHOICE)]
    assert together == [alone[0], alone[1], alone[2], alone[1], alone[0]] * 4


def test_the_input_is_a_conversation_of_text_json_and_calls(server: LiveServer) -> None:
    text = "The customer wants money back.\n\nIs this true? Answer with Y or N, and nothing else."
    items: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "Look:"}, {"type": "input_json", "data": [{"a": 1}]}],
        },
        CALL,
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    before: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look:"}, {"type": "text", "text": '[{"a":1}]'}],
        },
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    answer = decide(server, [PREDICATE], input=items)["answers"][0]
    assert answer["probability"] == pytest.approx(expected(server, text, ids("Y", "N"), before)[0], abs=1e-9)
    parts = [
        {"type": "input_text", "text": "The customer wants"},
        {"type": "input_json", "data": {"money": "back"}},
    ]
    assert decide(server, [{**PREDICATE, "instructions": parts}])["answers"][0]["type"] == "predicate"


def test_usage_and_metrics_count_every_question(server: LiveServer) -> None:
    before = server.metric("requests_total", endpoint="decisions", stream="false", outcome="length")
    first = decide(server, [PREDICATE, SCORE], input="A text that is read once. " * 3)["usage"]
    again = decide(server, [PREDICATE, SCORE], input="A text that is read once. " * 3)["usage"]
    assert first["output_tokens"] == 2
    assert first["total_tokens"] == first["input_tokens"] + 2
    assert again["input_tokens"] == first["input_tokens"]
    assert again["input_tokens_details"]["cached_tokens"] > first["input_tokens_details"]["cached_tokens"]
    assert (
        server.metric("requests_total", endpoint="decisions", stream="false", outcome="length") == before + 2
    )
    server.wait_for(server.is_idle)


def test_the_official_client(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        decision = client.decisions.create(
            model="fake-gemma",
            input=INPUT,
            questions=[
                {"type": "predicate", "instructions": "a"},
                {
                    "type": "choice",
                    "instructions": "b",
                    "name": "n",
                    "choices": [{"value": "x"}, {"value": False}],
                },
                {"type": "score", "instructions": "c", "levels": [{"label": "l"}, {"label": "h"}]},
            ],
            prompt_cache_key="k",
            safety_identifier="s",
        )
        assert [answer.type for answer in decision.answers] == ["predicate", "choice", "score"]
        assert decision.answers[1].type == "choice"
        assert decision.answers[1].choice in ("x", False)
        assert decision.model == "fake-gemma"
        assert decision.usage.output_tokens == 3
        with pytest.raises(openai.BadRequestError, match="questions"):
            client.decisions.create(model="fake-gemma", input=INPUT, questions=[])


def test_what_has_no_meaning_is_named(server: LiveServer) -> None:
    fields = {
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "explicit"},
        "safety_identifier": "s",
        "moon": 1,
    }
    response = server.post(DECISIONS, {"input": "a", "questions": [PREDICATE], **fields})
    assert (
        response.headers["x-gemserve-ignored-parameters"]
        == "moon, prompt_cache_key, prompt_cache_options, safety_identifier"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": None}, "questions"),
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [{**PREDICATE, "type": "essay"}]}, "questions[0].type"),
        ({"questions": [{**PREDICATE, "instructions": ""}]}, "questions[0].instructions"),
        (
            {"questions": [{**PREDICATE, "instructions": [{"type": "input_image"}]}]},
            "questions[0].instructions",
        ),
        ({"questions": [{**PREDICATE, "choices": CHOICE["choices"]}]}, "questions[0].choices"),
        ({"questions": [PREDICATE, {**SCORE, "type": "choice"}]}, "questions[1].choices"),
        ({"questions": [{**SCORE, "levels": None}]}, "questions[0].levels"),
        ({"questions": [{**SCORE, "levels": SCORE["levels"][:1]}]}, "questions[0].levels"),
        ({"questions": [{**SCORE, "levels": [{"label": str(i)} for i in range(11)]}]}, "questions[0].levels"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "a"}]}]}, "questions[0].choices"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": 1}]}]},
            "questions[0].choices[1].value",
        ),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a"}, {"value": "x" * 5000}]}]},
            "questions[0].choices[1].value",
        ),
        (
            {"questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(256)]}]},
            "questions[0].choices",
        ),
        # The fake's vocabulary has 62 labels.
        ({"questions": [{**CHOICE, "choices": [{"value": str(i)} for i in range(63)]}]}, "questions[0]"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "input[0].content",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": [1]}]}]}, "input"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "input": "x", "name": "f"}]}, "input[0]"),
        ({"input": [{"role": "assistant", "content": "a"}]}, "input[0].role"),
        ({"input": "a" * 600}, "questions[0]"),
        ({"input": "a" * 50_000, "questions": [PREDICATE] * 400}, "questions"),
        # However the text is spread over the fields of items.
        ({"input": [{**CALL, "name": "f" * 500}] * 90, "questions": [PREDICATE] * 400}, "questions"),
        ({"input": [{"role": "user", "content": [HIDDEN]}], "questions": [PREDICATE] * 400}, "questions"),
        ({"input": [{"role": "user", "content": ""}] * 2000, "questions": [PREDICATE] * 400}, "questions"),
        (
            {"input": [{"role": "user", "content": [EMPTY] * 2000}], "questions": [PREDICATE] * 400},
            "questions",
        ),
        ({"stream": True}, "stream"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_named(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert server.refused(DECISIONS, {"input": INPUT, "questions": [PREDICATE], **fields})["param"] == param


def test_what_is_wrong_behind_what_is_unknown_is_named(server: LiveServer) -> None:
    """The whole list is looked at only once its items are sound."""
    choices = [{"value": "a", "moon": 1}, {"value": "a"}]
    error = server.refused(DECISIONS, {"input": INPUT, "questions": [{**CHOICE, "choices": choices}]})
    assert error["param"] == "questions[0].choices"


def test_62_options_have_labels_of_their_own(scripted: LiveServer) -> None:
    choices = [{"value": f"v{i}"} for i in range(62)]
    (answer,) = decide(scripted, [{**CHOICE, "instructions": "?", "choices": choices}])["answers"]
    assert len(answer["probabilities"]) == 62
    assert sum(item["probability"] for item in answer["probabilities"]) == pytest.approx(1)


def test_a_model_that_is_not_served(server: LiveServer) -> None:
    body = {"input": "a", "questions": [PREDICATE]}
    assert server.refused(DECISIONS, {**body, "model": "gpt-6-luna"}, status=404)["param"] == "model"


def test_strict_roles_take_a_question_behind_the_users_turn(strict_server: LiveServer) -> None:
    assert decide(strict_server, [PREDICATE])["answers"][0]["type"] == "predicate"
    turns = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert (
        strict_server.refused(DECISIONS, {"input": turns, "questions": [PREDICATE]})["param"]
        == "input[1].role"
    )
    assert strict_server.post(CHAT, {"messages": turns}).status_code == 400
