"""Upper edges of the histograms on /metrics. Those of latencies are defaults of settings. Imports the
standard library only.

Edges that vLLM and OpenTelemetry's conventions use for the time to the first token below 2.5 s are kept where
they help, so that quantiles of different servers can be compared.
"""

from typing import Final

TIME_TO_FIRST_TOKEN: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0),
)
INTER_TOKEN_LATENCY: Final = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5),
    *(1.0, 2.5, 5.0),
)
REQUEST_DURATION: Final = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    20.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
REQUEST_PHASE: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
GRAMMAR_COMPILATION: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.5)
POWERS_OF_TWO: Final = tuple(float(2**i) for i in range(15))

# The longest context of a Gemma 3: histograms exist before the model is known, and are the same on every
# server.
MAX_TOKENS: Final = 131_072


def token_buckets(largest: int = MAX_TOKENS) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to ``largest``."""
    steps = [float(digit * 10**power) for power in range(len(str(largest))) for digit in (1, 2, 5)]
    return (*(step for step in steps if step < largest), float(largest))
