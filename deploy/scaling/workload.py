"""What clients ask of the simulated servers: requests with prompts of token ids, in groups that share a
beginning, arriving at random at a given rate or whenever an earlier one of the same client has ended."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """``rate``: requests per second, Poisson. ``clients``: instead, so many that each send the next one when
    the last has ended. ``spread``: lengths are drawn between (1 - spread) and (1 + spread) times their
    mean."""

    num_requests: int
    rate: float | None = None
    clients: int | None = None
    prompt_tokens: int = 512
    output_tokens: int = 128
    spread: float = 0.0
    groups: int = 0  # that share the beginning of their prompts; 0: nobody shares
    shared_tokens: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.clients is None):
            raise ValueError("give either a rate or a number of clients")
        if (self.rate or self.clients or 0) <= 0 or self.num_requests < 1:
            raise ValueError("rate, clients and requests must be above 0")
        if not 0 <= self.spread < 1 or self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("expected 0 <= spread < 1 and lengths of at least 1")
        if self.groups and not 0 < self.shared_tokens < self.prompt_tokens * (1 - self.spread):
            raise ValueError("the shared beginning must be shorter than every prompt")


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    number: int
    arrival: float | None  # None: when its client is free
    group: int | None
    prompt_token_ids: tuple[int, ...]
    output_tokens: int


def requests_of(demand: Demand) -> Iterator[SimulatedRequest]:
    """Depends on the demand alone."""
    draw = random.Random(demand.seed)
    heads = [
        tuple(draw.randrange(1 << 30) for _ in range(demand.shared_tokens)) for _ in range(demand.groups)
    ]
    now = 0.0

    def length(mean: int) -> int:
        return max(1, round(mean * (1 + demand.spread * (2 * draw.random() - 1))))

    for number in range(demand.num_requests):
        if demand.rate is not None:
            now += draw.expovariate(demand.rate)
        group = draw.randrange(demand.groups) if demand.groups else None
        head = heads[group] if group is not None else ()
        rest = length(demand.prompt_tokens) - len(head)
        # A beginning of its own makes a prompt unlike all others; what follows makes no difference to the
        # cache.
        own = (draw.randrange(1 << 30), *itertools.repeat(0, rest - 1))
        yield SimulatedRequest(
            number, now if demand.rate is not None else None, group, head + own, length(demand.output_tokens)
        )
