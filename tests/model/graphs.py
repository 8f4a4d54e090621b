"""Stands for a GPU in tests: a graph is the captured callable, run again over the same buffers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class RecordedEvent:
    """Counts, and checks the order of use."""

    recorded: int = 0
    synchronized: int = 0

    def record(self) -> None:
        assert self.recorded == self.synchronized, "memory was sent twice without a wait between"
        self.recorded += 1

    def synchronize(self) -> None:
        self.synchronized = self.recorded


@dataclass(eq=False)
class RerunDevice:
    """Captures nothing: replays by calling. Counts what was asked of it, by the number of rows of the result."""

    captured: list[int] = field(default_factory=list)
    replayed: list[int] = field(default_factory=list)
    events: list[RecordedEvent] = field(default_factory=list)
    before_replay: Callable[[], None] = lambda: None

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        step()
        output = step()
        self.captured.append(len(output))

        def replay() -> torch.Tensor:
            self.before_replay()
            self.replayed.append(len(output))
            output.copy_(step())
            return output  # the same memory each time, as of a graph

        return replay

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)  # never zeroed by chance

    def event(self) -> RecordedEvent:
        self.events.append(RecordedEvent())
        return self.events[-1]
