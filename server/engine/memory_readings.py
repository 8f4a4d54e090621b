"""What memory holds, for the metrics: read by the engine's thread, so that a scrape never asks a device that
hangs."""

import time
from collections.abc import Callable, Mapping

# A reading takes some system calls: not one per step.
INTERVAL_SECONDS = 1.0


class MemoryReadings:
    """``latest`` is a mapping that is replaced, never changed."""

    def __init__(
        self, read: Callable[[], dict[str, int]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock = clock
        self.latest: Mapping[str, int] = read()
        self._read_at = clock()

    def refresh(self) -> None:
        """After a step, in the engine's thread."""
        now = self._clock()
        if now - self._read_at >= INTERVAL_SECONDS:
            self._read_at = now
            self.latest = self._read()
