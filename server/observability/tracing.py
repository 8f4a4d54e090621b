"""What a finished request tells its tracer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

PROPAGATION_HEADERS = ("traceparent", "tracestate")

Attribute = str | int | float | bool | Sequence[str]


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request, from one monotonic time to another."""

    name: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """A request that has ended. ``carrier``: the headers that say which trace it belongs to. Times are
    monotonic."""

    name: str
    began: float
    ended: float
    phases: Sequence[Phase]
    attributes: Mapping[str, Attribute]
    carrier: Mapping[str, str] = field(default_factory=dict)
    error_type: str | None = None


class RequestTracer(Protocol):
    def record(self, trace: RequestTrace) -> str:
        """Send the trace on, and return its id. Never waits."""
        ...

    def close(self) -> None:
        """Send what is left. May wait for the collector."""
        ...
