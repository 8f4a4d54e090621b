"""The loads that are sent, and their results as a table and as values."""

import itertools
from dataclasses import replace

import pytest

from server.bench.engine_share import EngineSeconds
from server.bench.load import RequestResult, Workload, constraint
from server.bench.report import render_table, result_values
from server.bench.run import Measurement, Target
from server.settings.settings import SettingsError

RESULTS = [
    RequestResult(0.1, 0.01, 10),
    RequestResult(0.3, 0.03, 10),
    RequestResult(error="status 500: broken"),
]


def measurement(name: str, wall_seconds: float, *, engine: EngineSeconds | None = None) -> Measurement:
    target = Target(name, "http://127.0.0.1:1")
    return Measurement(target, 2, "m", 4, wall_seconds, list(RESULTS), engine)


def test_rates_count_what_succeeded() -> None:
    (values,) = result_values([measurement("one", 2.0)])
    assert (values["requests"], values["succeeded"]) == (3, 2)
    assert (values["output_tokens_per_second"], values["requests_per_second"]) == (10.0, 1.0)
    assert values["total_tokens_per_second"] == 14.0
    assert values["ttft_ms"] == {"median": 200.0, "p95": 300.0}
    assert values["errors"] == ["status 500: broken"]
    assert values["ratio"] is None, "there is nothing to compare with"


def test_ratios_are_to_the_first_server() -> None:
    both = [measurement("one", 2.0), measurement("two", 1.0)]
    assert [values["ratio"] for values in result_values(both)] == [1.0, 2.0]
    table = render_table(both).splitlines()
    assert [row.split()[0] for row in table] == ["server", "one", "two", "one:", "two:"]
    assert table[2].split()[-1] == "2.00x"


def test_nothing_that_came_is_shown_as_nothing() -> None:
    empty = replace(measurement("one", 2.0), results=[RequestResult(error="x")])
    assert render_table([empty]).splitlines()[1].split() == ["one", "2", "0.0", "0.00", *"----", "1", "-"]


def test_the_share_outside_the_model() -> None:
    engine = EngineSeconds(1.5, 0.1).since(EngineSeconds(0.5, 0.0)) + EngineSeconds(0.5, 0.0)
    assert measurement("one", 2.0, engine=engine).outside_model == pytest.approx(1 - 1.4 / 2.0)
    assert "30.0% of the time outside" in render_table([measurement("one", 2.0, engine=engine)])


def test_targets_are_addresses() -> None:
    assert Target.parse("a=http://host:1/v1/").url == "http://host:1"
    for text in ("a", "a=", "a=host:1", "=http://host"):
        with pytest.raises(SettingsError, match="expected an address"):
            Target.parse(text)


def test_prompts_depend_on_the_workload_alone() -> None:
    load = Workload(prompt_tokens=16, output_tokens=4, shared_prefix=8)

    def first(workload: Workload) -> list[list[int]]:
        return list(itertools.islice(workload.prompts(), 3))

    prompts = first(load)
    assert prompts == first(load) != first(replace(load, seed=load.seed + 1))
    assert {len(prompt) for prompt in prompts} == {16}
    assert len({tuple(prompt[:9]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_a_constraint_cannot_end_early() -> None:
    def least(output_tokens: int) -> int:
        schema = constraint(output_tokens)["response_format"]["json_schema"]["schema"]  # type: ignore[index]
        return int(schema["minItems"])

    assert least(1000) > least(10) >= 1
