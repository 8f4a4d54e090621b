"""``gemserve bench`` against a small server: what it sends, what it counts, and what it does with
failures."""

import itertools
import json

import jsonschema
import pytest

from server.__main__ import main
from server.bench.engine_share import EngineSeconds
from server.bench.load import TOKENS_PER_RECORD, Workload, constraint
from server.settings.settings import SettingsError
from tests.server.cli.fake_server import fake_server

SMALL = ["--requests", "4", "--prompt-tokens", "6", "--output-tokens", "3"]


def test_sends_streaming_requests_of_random_ids_and_reports_them(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        assert main(["bench", server.url, *SMALL, "--concurrency", "1", "2", "--top-p", "0.9", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [row["concurrency"] for row in values["results"]] == [1, 2]
    assert all(
        row["succeeded"] == 4 and row["errors"] == [] and row["ratio"] is None for row in values["results"]
    )
    assert values["results"][0]["model"] == "fake-model"
    assert values["results"][0]["output_tokens_per_second"] > 0
    assert len(server.bodies) == 1 + 2 * 4
    for body in server.bodies:
        assert body["prompt"][0] == 2
        assert len(body["prompt"]) == 6
        assert all(2000 <= token < 60_000 for token in body["prompt"][1:])
        assert body["ignore_eos"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert body["top_p"] == 0.9
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies)


def test_compare_alternates_and_gives_both_the_same_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as one, fake_server() as two:
        pair = [f"one={one.url}", f"two={two.url}/v1"]
        assert main(["bench", "--compare", *pair, *SMALL, "--rounds", "2", "--concurrency", "2"]) == 0
    output = capsys.readouterr()
    assert "1.00x" in output.out
    assert [line.split(":")[0] for line in output.err.splitlines()] == ["one", "two", "two", "one"]
    assert sorted(body["prompt"] for body in one.bodies) == sorted(body["prompt"] for body in two.bodies)


def test_constrained_takes_turns_with_free_on_one_server(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as server:
        assert (
            main(
                [
                    "bench",
                    server.url,
                    *SMALL,
                    "--rounds",
                    "2",
                    "--concurrency",
                    "2",
                    "--constrained",
                    "--json",
                ]
            )
            == 0
        )
    output = capsys.readouterr()
    assert [line.split(":")[0] for line in output.err.splitlines()] == [
        "free",
        "constrained",
        "constrained",
        "free",
    ]
    free, constrained = json.loads(output.out)["results"]
    assert (free["server"], constrained["server"], free["ratio"]) == ("free", "constrained", 1.0)
    assert constrained["ratio"] > 0
    measured = server.bodies[2:]  # after one warm-up of each
    assert [
        sum("response_format" in body for body in bodies) for bodies in (server.bodies[:2], measured)
    ] == [1, 4]
    assert len({tuple(body["prompt"]) for body in measured}) == 8


def test_the_constraint_has_enough_records_for_the_limit() -> None:
    response_format = constraint(128)["response_format"]
    assert isinstance(response_format, dict)
    schema = response_format["json_schema"]["schema"]
    shortest = {"name": "", "kind": "idea", "count": 0, "weight": 0, "known": True, "tags": []}
    jsonschema.validate([shortest] * (128 // TOKENS_PER_RECORD + 1), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([shortest] * (128 // TOKENS_PER_RECORD), schema)


@pytest.mark.parametrize("options", [{"fail_with": 503}, {"break_stream": True}])
def test_failures_are_counted_and_give_1(
    options: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server(**options) as server:
        assert main(["bench", server.url, *SMALL, "--json"]) == 1
    row = json.loads(capsys.readouterr().out)["results"][0]
    assert row["succeeded"] == 0
    assert "no room" in row["errors"][0] or "without [DONE]" in row["errors"][0]


def test_prompts_depend_on_the_seed_and_share_the_prefix_asked_for() -> None:
    def first(workload: Workload) -> list[list[int]]:
        return list(itertools.islice(workload.prompts(), 3))

    workload = Workload(prompt_tokens=10, shared_prefix=4, seed=1)
    prompts = first(workload)
    assert prompts == first(workload)
    assert prompts != first(Workload(prompt_tokens=10, shared_prefix=4, seed=2))
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3
    with pytest.raises(SettingsError, match="--shared-prefix 10 leaves no room"):
        Workload(prompt_tokens=10, shared_prefix=10)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "either one URL or --compare"),
        (["localhost:8000"], "expected an address"),
        (["--compare", "a=http://127.0.0.1:1", "a=http://127.0.0.1:1"], "a name of its own"),
        (["http://127.0.0.1:1"], "lists no models"),
        (["http://127.0.0.1:1", "--concurrency", "0"], "must be at least 1"),
        (
            ["--compare", "a=http://127.0.0.1:1", "b=http://127.0.0.1:2", "--constrained"],
            "compares one server with itself",
        ),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_the_share_outside_the_model_is_told_of_servers_that_count_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server(tells_engine=True) as server, fake_server() as silent:
        pair = [f"one={server.url}", f"two={silent.url}"]
        assert (
            main(["bench", "--compare", *pair, *SMALL, "--rounds", "2", "--concurrency", "2", "--json"]) == 0
        )
        one, two = json.loads(capsys.readouterr().out)["results"]
        assert main(["bench", server.url, *SMALL]) == 0
    assert one["outside_model"] == pytest.approx(1 - 4 * 0.00075 / one["wall_seconds"], abs=0.02)
    assert two["outside_model"] is None
    assert "of the time outside the model's steps" in capsys.readouterr().out


def test_scheduling_counts_as_outside_the_model() -> None:
    spent = EngineSeconds(30.0, 1.0).since(EngineSeconds(10.0, 0.5)) + EngineSeconds(10.0, 0.5)
    assert spent == EngineSeconds(30.0, 1.0)
    assert spent.outside_model(40.0) == pytest.approx(0.275)


def test_the_engines_overhead_is_measured_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--engine-overhead", "3", "--concurrency", "2", "5", "--prompt-tokens", "40"]) == 0
    report = capsys.readouterr().out
    assert "2 sequences, contexts up to 40 tokens, greedy; 3 steps" in report
    assert "5 sequences" in report


@pytest.mark.parametrize(
    "options",
    [["0"], ["3", "http://127.0.0.1:1"], ["3", "--concurrency", "0"], ["3", "--prompt-tokens", "0"]],
)
def test_an_engine_overhead_that_cannot_be_measured_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--engine-overhead", *options]) != 0
    error = capsys.readouterr().err
    assert "must be at least 1" in error or "takes a number from 1 on" in error
