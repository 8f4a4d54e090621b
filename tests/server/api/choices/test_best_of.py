"""Which choices are returned: all, or with best_of the likeliest of each prompt, best first."""

from model.interface.sequence_chunk import TokenLogprobs
from server.api.choices.best_of import ChoiceRanking
from tests.server.api.events import event, plan


def token(logprob: float) -> TokenLogprobs:
    return TokenLogprobs(5, logprob, [])


def test_without_best_of_all_are_returned_in_their_order() -> None:
    ranking = ChoiceRanking(plan(num_prompts=2, n=2))
    ranking.observe(event("a", index=3, logprobs=[token(-0.1)]))
    assert ranking.returned() == [0, 1, 2, 3]


def test_the_likeliest_by_the_mean_of_a_token_and_the_first_of_equals() -> None:
    ranking = ChoiceRanking(plan(num_prompts=2, n=3, num_best=2))
    for index, logprobs in {
        0: [-1.0],
        1: [-0.5, -0.7],  # a longer text is not less likely for its length
        2: [-2.0],
        3: [-3.0],
        4: [-1.0, -1.0],
        5: [-1.0],
    }.items():
        for logprob in logprobs:
            ranking.observe(event("x", index=index, logprobs=[token(logprob)]))
    assert ranking.returned() == [1, 0, 4, 5]
