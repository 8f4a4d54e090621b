"""Until when a client waits. It says so by the header X-Request-Timeout or the field ``timeout``: then the
whole answer must be there in time. OpenAI's Python client also tells how long it waits for the next byte: a
hint when queued work became useless."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from server.errors import invalid_request, shorten

TIMEOUT_HEADER = "x-request-timeout"
READ_TIMEOUT_HEADER = "x-stainless-read-timeout"
MIN_TIMEOUT_SECONDS = 0.001
MAX_TIMEOUT_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at``: the monotonic time at which the whole answer must be there; None: never. ``patience``: seconds
    without a byte after which the client gives up, counted from ``asked_at``, the end of its request."""

    at: float | None = None
    patience: float | None = None
    asked_at: float = 0.0

    @classmethod
    def of(cls, headers: Mapping[str, str], arrival: float, *timeouts: float | None) -> "Deadline":
        """The earliest of several timeouts holds. ``arrival`` is when the request began to come in; now is
        its end."""
        given = [seconds for seconds in timeouts if seconds is not None]
        return cls(arrival + min(given) if given else None, read_timeout_hint(headers), time.monotonic())

    @property
    def remaining(self) -> float | None:
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    def queue_deadline(self, *, stream: bool, num_sequences: int, keep_alive_seconds: float) -> float | None:
        """Until when the work of a request may be started. An answer in one piece has no byte before its end.
        A stream has, from any of its sequences, and a comment every ``keep_alive_seconds`` keeps patient
        clients waiting."""
        patience = self.patience
        if stream and (num_sequences > 1 or (patience is not None and patience >= keep_alive_seconds)):
            patience = None
        gives_up_at = None if patience is None else self.asked_at + patience
        return min((time for time in (self.at, gives_up_at) if time is not None), default=None)


def header_timeout(headers: Mapping[str, str]) -> float | None:
    """Seconds of the header X-Request-Timeout. Raises ApiError when it is no number within the limits."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    seconds = _seconds(given)
    if seconds is None:
        raise invalid_request(
            f"Invalid value for the header X-Request-Timeout: expected seconds from {MIN_TIMEOUT_SECONDS:g} "
            f"to {MAX_TIMEOUT_SECONDS:g}, got {shorten(given, 40)!r}.",
            param="X-Request-Timeout",
            code="invalid_value",
        )
    return seconds


def read_timeout_hint(headers: Mapping[str, str]) -> float | None:
    """Seconds that OpenAI's client waits for a byte; what it cannot mean is no hint."""
    return _seconds(headers.get(READ_TIMEOUT_HEADER, ""))


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if MIN_TIMEOUT_SECONDS <= seconds <= MAX_TIMEOUT_SECONDS else None
