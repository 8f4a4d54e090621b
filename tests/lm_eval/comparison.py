"""Scores that came over HTTP against those of the reference."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.lm_eval.reference import Reference
from tests.lm_eval.task import Question, accuracy

TOLERANCE = 1e-3  # of a continuation's log-probability; float32 sums in another order differ by less


@dataclass(frozen=True, slots=True)
class Comparison:
    accuracy: float
    reference_accuracy: float
    largest_difference: float
    num_continuations: int
    num_greedy: int  # continuations that are the likeliest token by token
    wrong_flags: tuple[str, ...]  # continuations whose greedy flag is not the reference's

    def line(self) -> str:
        return (
            f"lm-eval: accuracy {self.accuracy:.2f} over HTTP, {self.reference_accuracy:.2f} in this "
            f"process; largest difference of {self.num_continuations} log-probabilities "
            f"{self.largest_difference:.1e}; {self.num_greedy} greedy, {len(self.wrong_flags)} flags wrong"
        )


def compare(
    reference: Reference, questions: Sequence[Question], results: Sequence[Sequence[tuple[float, bool]]]
) -> Comparison:
    """``results``: lm-eval's (log-probability, is greedy) of each question's continuations."""
    expected: list[list[float]] = []
    differences, wrong = [], []
    for question, row in zip(questions, results, strict=True):
        scores = [reference.score(question.context, continuation) for continuation in question.continuations]
        expected.append([score.logprob for score in scores])
        for continuation, score, (logprob, is_greedy) in zip(
            question.continuations, scores, row, strict=True
        ):
            differences.append(abs(logprob - score.logprob))
            if abs(score.margin) > TOLERANCE and is_greedy != (score.margin > 0):
                wrong.append(question.context + continuation)
    flags = [is_greedy for row in results for _, is_greedy in row]
    found = accuracy(questions, [[logprob for logprob, _ in row] for row in results])
    return Comparison(
        found, accuracy(questions, expected), max(differences), len(differences), sum(flags), tuple(wrong)
    )
