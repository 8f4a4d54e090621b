"""``gemserve bench --front-end``: the real application over a model that takes no time."""

import json

import pytest

from server.__main__ import main
from server.bench.front_end import Round, render_rounds
from server.bench.front_end_server import word_tokenizer

# So many tokens that they take several of the hundredths of a second in which processor time is counted.
SMALL = ["--concurrency", "4", "--prompt-tokens", "20", "--output-tokens", "400"]


def test_every_token_of_every_stream_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--front-end", "2", *SMALL, "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.splitlines() == ["4 streams, round 1 of 2 done", "4 streams, round 2 of 2 done"]
    rounds = json.loads(output.out)
    assert [(one["streams"], one["tokens"]) for one in rounds] == [(4, 1600), (4, 1600)]
    for one in rounds:
        assert 4 <= one["events"] <= 4 * (400 + 1)  # at most one for each token, and one for the end
        assert one["tokens_per_second"] > 0
        assert one["processor_microseconds_per_token"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--front-end", "0"], "--front-end takes a number from 1 on"),
        (["--front-end", "1", "http://127.0.0.1:1"], "--front-end takes a number from 1 on"),
        (["--front-end", "1", "--concurrency", "0"], "--concurrency must be at least 1"),
        (["--front-end", "1", "--output-tokens", "0"], "--output-tokens must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_the_table_ends_with_medians() -> None:
    rounds = [Round(4, 100_000, 100_004, seconds, seconds / 2) for seconds in (4.0, 10.0, 5.0)]
    lines = render_rounds(rounds).splitlines()
    assert lines[1].split() == ["4", "25,000", "20.0", "1.00"]
    assert lines[-1].split() == ["median", "20,000", "25.0"]


def test_a_token_of_the_model_without_weights_is_a_word() -> None:
    tokenizer = word_tokenizer()
    assert tokenizer.decode([1000, 1001]) == " w1000 w1001"
    assert tokenizer.decode([238 + ord("a")]) == "a"
