"""The task that lm-eval scores: 100 questions with four answers each. ``facts.yaml`` tells lm-eval the
same."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
TASK = "gemserve_facts"


@dataclass(frozen=True, slots=True)
class Question:
    context: str
    continuations: tuple[str, ...]
    right: int  # index of the right one


def questions() -> list[Question]:
    lines = (FOLDER / "facts.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        Question(
            f"<bos>{item['question']}", tuple(f" {choice}" for choice in item["choices"]), item["answer"]
        )
        for item in map(json.loads, lines)
    ]


def accuracy(questions: Sequence[Question], scores: Sequence[Sequence[float]]) -> float:
    """The share of questions whose right answer is the likeliest: lm-eval's ``acc``."""
    best = [max(range(len(row)), key=row.__getitem__) for row in scores]
    return sum(question.right == index for question, index in zip(questions, best, strict=True)) / len(
        questions
    )
