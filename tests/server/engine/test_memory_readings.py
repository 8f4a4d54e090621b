"""Memory is read at the start, and after steps at most once per interval."""

from server.engine.memory_readings import INTERVAL_SECONDS, MemoryReadings


def test_readings_are_as_old_as_the_last_step_and_cost_one_per_interval() -> None:
    now, reads = 0.0, 0

    def read() -> dict[str, int]:
        nonlocal reads
        reads += 1
        return {"weights": reads}

    readings = MemoryReadings(read, clock=lambda: now)
    assert readings.latest == {"weights": 1}
    readings.refresh()
    assert readings.latest == {"weights": 1}
    now += INTERVAL_SECONDS
    for _ in range(5):
        readings.refresh()
    assert readings.latest == {"weights": 2}
