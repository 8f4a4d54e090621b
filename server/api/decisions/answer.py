"""The answers to typed questions, from how likely the model is to begin with each of their labels. Pure: no
I/O."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from server.api.decisions.request import DecisionQuestion, DecisionRequest
from server.api.generation.answer import Answer
from server.api.generation.run import ChoiceEvent, Usage
from server.api.generation.wire_values import ResponseHead
from server.api.responses.answer import ResponseUsageSchema, wire_usage
from server.http.json_response import encode_json


class PredicateAnswer(TypedDict):
    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceProbability(TypedDict):
    value: str | bool
    probability: float


class ChoiceAnswerSchema(TypedDict):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: Annotated[float, Field(description="The probability of the choice.")]
    probabilities: list[ChoiceProbability]


class LevelProbability(TypedDict):
    label: str
    value: Annotated[int, Field(description="The position of the level, from 0.")]
    probability: float


class ScoreAnswer(TypedDict):
    type: Literal["score"]
    name: str | None
    score: Annotated[float, Field(description="The mean of the levels' values by their probabilities.")]
    confidence: Annotated[float, Field(description="The probability of the likeliest level.")]
    probabilities: list[LevelProbability]


TypedAnswer = PredicateAnswer | ChoiceAnswerSchema | ScoreAnswer


class DecisionResponse(TypedDict):
    model: str
    answers: list[TypedAnswer]
    usage: ResponseUsageSchema


def probabilities(logprobs: Sequence[float]) -> list[float]:
    """Of the options alone: their log-probabilities, normalised."""
    highest = max(logprobs)
    weights = [math.exp(value - highest) for value in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


def typed_answer(question: DecisionQuestion, found: Sequence[float]) -> TypedAnswer:
    """``found``: the probability of each option."""
    name = question.name
    best = max(range(len(found)), key=lambda index: found[index])
    if question.type == "predicate":
        return {"type": "predicate", "name": name, "probability": found[0]}
    if question.type == "choice":
        values = [choice.value for choice in question.choices or ()]
        return {
            "type": "choice",
            "name": name,
            "choice": values[best],
            "confidence": found[best],
            "probabilities": [
                {"value": value, "probability": probability}
                for value, probability in zip(values, found, strict=True)
            ],
        }
    return {
        "type": "score",
        "name": name,
        "score": sum(value * probability for value, probability in enumerate(found)),
        "confidence": found[best],
        "probabilities": [
            {"label": level.label, "value": value, "probability": probability}
            for value, (level, probability) in enumerate(zip(question.levels or (), found, strict=True))
        ],
    }


class DecisionAnswer(Answer):
    def __init__(self, body: DecisionRequest, head: ResponseHead) -> None:
        self._questions = body.questions
        self._head = head
        self._found: dict[int, list[float]] = {}

    def collect(self, event: ChoiceEvent) -> None:
        for token in event.logprobs:
            self._found[event.index] = probabilities([logprob for _, logprob in token.top])

    async def written(self, usage: Usage) -> bytes:
        found = [self._found[index] for index in range(len(self._questions))]
        answers = list(map(typed_answer, self._questions, found))
        body: DecisionResponse = {"model": self._head.model, "answers": answers, "usage": wire_usage(usage)}
        return encode_json(body)
