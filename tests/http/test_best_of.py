"""best_of: more choices are drawn than returned, and the likeliest are returned first."""

from typing import Any

import pytest

from tests.http.live_server import LiveServer
from tests.http.test_streams import COMPLETIONS

DRAWN: dict[str, Any] = {"prompt": ["Hello", "Bye"], "max_tokens": 12, "temperature": 1, "seed": 11}


def mean(choice: dict[str, Any]) -> float:
    values = choice["logprobs"]["token_logprobs"]
    return float(sum(values) / len(values))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", [{}, {"stop": "e"}])
def test_the_likeliest_choices_are_returned_best_first(
    server: LiveServer, n: int, options: dict[str, Any]
) -> None:
    everything = server.complete(**DRAWN, n=6, logprobs=0, **options)
    best = server.complete(**DRAWN, n=n, best_of=6, logprobs=0, **options)
    expected = []
    for prompt in range(2):
        ranked = sorted(everything["choices"][prompt * 6 : prompt * 6 + 6], key=mean, reverse=True)
        assert mean(ranked[0]) > mean(ranked[-1])
        expected += ranked[:n]
    assert best["choices"] == [{**choice, "index": index} for index, choice in enumerate(expected)]
    # All that was generated counts, and a prompt counts once.
    assert best["usage"]["completion_tokens"] == everything["usage"]["completion_tokens"]
    assert best["usage"]["prompt_tokens"] == everything["usage"]["prompt_tokens"]


def test_log_probabilities_are_not_shown_unless_asked_for(server: LiveServer) -> None:
    shown = server.complete(**DRAWN, best_of=6, logprobs=0)["choices"]
    plain = server.complete(**DRAWN, best_of=6)["choices"]
    assert [choice["logprobs"] for choice in plain] == [None, None]
    assert [choice["text"] for choice in plain] == [choice["text"] for choice in shown]


def test_equal_choices_and_empty_ones_are_answers_too(server: LiveServer) -> None:
    greedy = server.complete(prompt="Hello", max_tokens=5, temperature=0, best_of=3, n=2)
    one = server.complete(prompt="Hello", max_tokens=5, temperature=0)
    assert [choice["text"] for choice in greedy["choices"]] == [one["choices"][0]["text"]] * 2
    assert greedy["usage"]["completion_tokens"] == 15
    empty = server.complete(prompt="Hello", max_tokens=0, best_of=3)
    assert [choice["text"] for choice in empty["choices"]] == [""]


def test_metrics_count_what_usage_counts(server: LiveServer) -> None:
    before = server.metric("generation_tokens_total")
    usage = server.complete(**DRAWN, best_of=5)["usage"]
    assert usage["completion_tokens"] == 2 * 5 * 12
    assert server.metric("generation_tokens_total") - before == usage["completion_tokens"]


def test_best_of_is_at_least_n_and_not_streamed(server: LiveServer) -> None:
    below = server.refused(COMPLETIONS, {**DRAWN, "n": 3, "best_of": 2})
    assert (below["param"], below["code"]) == ("best_of", "integer_below_min_value")
    streamed = server.refused(COMPLETIONS, {**DRAWN, "best_of": 2, "stream": True})
    assert (streamed["param"], streamed["code"]) == ("best_of", "invalid_value")
    assert server.post(COMPLETIONS, {**DRAWN, "n": 2, "best_of": 2, "stream": True}).status_code == 200
    many = server.refused(COMPLETIONS, {"prompt": ["a"] * 100, "best_of": 20})
    assert (many["param"], many["code"]) == ("best_of", "integer_above_max_value")
