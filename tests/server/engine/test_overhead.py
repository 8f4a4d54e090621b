"""What a decode step costs the host, in operations: a number that no other load on the machine changes."""

import gc
import sys
from collections import Counter
from typing import Any

import pytest

from model.bench.stub_device import stub_runner
from server.bench.engine_overhead import BLOCK_SIZE, decoding_core, measure_overhead, render

C_CALLS_PER_SEQUENCE = 1  # the append of its token


def calls(lengths: list[int], temperature: float = 0.0) -> Counter[str]:
    """Calls of Python functions and of built-in ones in a step in which every sequence decodes and none
    begins a block."""
    assert all(length % BLOCK_SIZE == 1 for length in lengths), (
        "with the tokens of the first steps, all stay in their block"
    )
    runner = stub_runner(BLOCK_SIZE)
    core = decoding_core(runner, runner.spec, lengths, temperature)
    for _ in range(2):
        core.step()  # the sequences are now the same from step to step
    counts: Counter[str] = Counter()

    def count(_frame: object, event: str, _argument: Any) -> None:
        counts[event] += 1

    gc.disable()  # it would call whoever wants to know when it runs, as hypothesis does
    sys.setprofile(count)
    try:
        events = core.step()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(events) == len(lengths)
    return counts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_decode_step_calls_no_function_per_sequence_but_a_few_built_in_ones(temperature: float) -> None:
    few, many = calls([33] * 4, temperature), calls([33] * 100, temperature)
    assert many["call"] == few["call"]
    assert many["c_call"] - few["c_call"] <= C_CALLS_PER_SEQUENCE * 96


def test_calls_of_the_garbage_collector_are_not_counted() -> None:
    def told(_phase: str, _info: dict[str, int]) -> None:
        pass

    expected, thresholds = calls([33] * 4), gc.get_threshold()
    gc.callbacks.append(told)
    gc.set_threshold(1)
    try:
        assert calls([33] * 4) == expected
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(told)


def test_a_decode_step_costs_the_same_calls_at_every_context() -> None:
    assert calls([33] * 8) == calls([2049] * 8)


def test_the_report_names_every_part_and_the_delivery() -> None:
    parts = measure_overhead(3, 40, 20, temperature=1.0)
    assert len(parts.steps) == len(parts.steps_ahead) == len(parts.deliveries) == 20
    assert all(step["schedule"] > 0 < step["sample"] for step in parts.steps_ahead), (
        "every step was launched ahead"
    )
    report = render(parts, 3, 40, 1.0)
    parts_named = (
        "schedule",
        "chunks",
        "batch",
        "sample",
        "update",
        "books",
        "step",
        "waits",
        "ahead",
        "delivery",
    )
    for name in (*parts_named, "3 sequences", "temperature 1"):
        assert name in report
