"""From how likely each label is to a typed answer."""

import asyncio
import json
import math
from typing import Any

import pytest

from model.interface.sequence_chunk import TokenLogprobs
from server.api.decisions.answer import DecisionAnswer, probabilities, typed_answer
from server.api.decisions.request import DecisionQuestion, DecisionRequest
from tests.server.api.events import HEAD, event, usage


def question(kind: str, **fields: Any) -> DecisionQuestion:
    return DecisionQuestion.model_validate({"type": kind, "instructions": "Is it?", "name": "q", **fields})


def test_the_options_share_all_of_the_probability() -> None:
    assert probabilities([-1.0, -1.0]) == [0.5, 0.5]
    assert sum(probabilities([-1.0, -2.0, -900.0])) == pytest.approx(1.0)
    assert probabilities([-2000.0, -2001.0])[0] == pytest.approx(1 / (1 + math.exp(-1)))


def test_a_predicate_is_the_probability_of_yes() -> None:
    assert typed_answer(question("predicate"), [0.7, 0.3]) == {
        "type": "predicate",
        "name": "q",
        "probability": 0.7,
    }


def test_a_choice_is_the_likeliest_value() -> None:
    asked = question("choice", choices=[{"value": "a"}, {"value": True}])
    assert typed_answer(asked, [0.25, 0.75]) == {
        "type": "choice",
        "name": "q",
        "choice": True,
        "confidence": 0.75,
        "probabilities": [{"value": "a", "probability": 0.25}, {"value": True, "probability": 0.75}],
    }


def test_a_score_is_the_mean_of_its_levels() -> None:
    asked = question("score", levels=[{"label": "bad"}, {"label": "fair"}, {"label": "good"}])
    found = typed_answer(asked, [0.25, 0.25, 0.5])
    assert found["type"] == "score"
    assert (found["score"], found["confidence"]) == (1.25, 0.5)
    assert [(level["label"], level["value"]) for level in found["probabilities"]] == [
        ("bad", 0),
        ("fair", 1),
        ("good", 2),
    ]


def test_answers_stand_in_the_order_of_their_questions() -> None:
    asked = [{"type": "predicate", "instructions": "Is it?", "name": name} for name in ("first", "second")]
    body = DecisionRequest.model_validate({"input": "hi", "questions": asked})
    said = DecisionAnswer(body, HEAD)
    for index, share in ((1, 0.25), (0, 0.5)):
        top = [(5, math.log(share)), (6, math.log(1 - share))]
        said.collect(event(index=index, logprobs=[TokenLogprobs(5, top[0][1], top)], finish="length"))
    written = json.loads(asyncio.run(said.written(usage(prompt=9))))
    assert [(one["name"], round(one["probability"], 3)) for one in written["answers"]] == [
        ("first", 0.5),
        ("second", 0.25),
    ]
    assert (written["model"], written["usage"]["input_tokens"]) == ("tiny", 9)
