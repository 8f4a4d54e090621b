"""Which choices of a finished run are returned: all of them, or with best_of the likeliest of each prompt,
best first."""

from server.api.generation.plan import GenerationPlan
from server.api.generation.run import ChoiceEvent


class ChoiceRanking:
    """Takes every event of a run; afterwards names the choices to return. Likelier: the mean of the raw
    log-probabilities of all generated tokens that count is higher; of equals the first comes first."""

    def __init__(self, plan: GenerationPlan) -> None:
        self._plan = plan
        self._sums = [0.0] * plan.num_choices
        self._counts = [0] * plan.num_choices

    def observe(self, event: ChoiceEvent) -> None:
        if self._plan.num_best is not None:
            self._sums[event.index] += sum(token.logprob for token in event.logprobs)
            self._counts[event.index] += len(event.logprobs)

    def returned(self) -> list[int]:
        """Indices of choices in the order of the answer."""
        plan = self._plan
        if plan.num_best is None:
            return list(range(plan.num_choices))
        chosen: list[int] = []
        for first in range(0, plan.num_choices, plan.n):
            candidates = range(first, first + plan.n)
            chosen += sorted(candidates, key=lambda index: -self._sums[index] / max(1, self._counts[index]))[
                : plan.num_best
            ]
        return chosen
