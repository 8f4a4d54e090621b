"""Shapes of the answers of /v1/decisions, for the OpenAPI description."""

from typing import Literal

from pydantic import BaseModel, Field

from server.api.schemas.answers import ResponseUsageSchema


class PredicateAnswer(BaseModel):
    type: Literal["predicate"]
    name: str | None
    probability: float


class ChoiceProbability(BaseModel):
    value: str | bool
    probability: float


class ChoiceAnswerSchema(BaseModel):
    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float = Field(description="The probability of the choice.")
    probabilities: list[ChoiceProbability]


class LevelProbability(BaseModel):
    label: str
    value: int = Field(description="The position of the level, from 0.")
    probability: float


class ScoreAnswer(BaseModel):
    type: Literal["score"]
    name: str | None
    score: float = Field(description="The mean of the levels' values by their probabilities.")
    confidence: float = Field(description="The probability of the likeliest level.")
    probabilities: list[LevelProbability]


class DecisionResponse(BaseModel):
    model: str
    answers: list[PredicateAnswer | ChoiceAnswerSchema | ScoreAnswer]
    usage: ResponseUsageSchema
