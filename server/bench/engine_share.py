"""What everything outside the model costs under a load: the wall time less what a gemserve server says it
spent in the model's steps, read off its counters before and after. Other servers have no such counters, and
nothing is said of them."""

import re
from dataclasses import dataclass

import httpx

_BUSY = re.compile(r"^gemserve_engine_busy_seconds_total (\S+)$", re.MULTILINE)
_SCHEDULE = re.compile(r'^gemserve_engine_host_seconds_total\{stage="schedule"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EngineSeconds:
    """Of the engine's thread: in steps, and what of them was not the model but the schedule and its books."""

    busy: float
    schedule: float

    def since(self, earlier: "EngineSeconds") -> "EngineSeconds":
        return EngineSeconds(self.busy - earlier.busy, self.schedule - earlier.schedule)

    def __add__(self, other: "EngineSeconds") -> "EngineSeconds":
        return EngineSeconds(self.busy + other.busy, self.schedule + other.schedule)

    def outside_model(self, wall_seconds: float) -> float:
        """Share of the wall time in which the model did not run. Requests must have been there all the
        time."""
        return 1 - (self.busy - self.schedule) / wall_seconds


async def engine_seconds(client: httpx.AsyncClient, url: str) -> EngineSeconds | None:
    try:
        response = await client.get(url + "/metrics")
    except httpx.HTTPError:
        return None
    busy, schedule = _BUSY.search(response.text), _SCHEDULE.search(response.text)
    if response.status_code != 200 or busy is None:
        return None
    return EngineSeconds(float(busy[1]), 0.0 if schedule is None else float(schedule[1]))
