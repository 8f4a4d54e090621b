"""The random numbers of draws, each fixed by the seed and the choice of its request and the position of its
token. No torch."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MASK_64 = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a number in [0, 1) with 53 random bits, fixed by its arguments: splitmix64 (Steele, Lea and
    Flood 2014) chained over the words of all of them.

    Any integer is a seed; integers that differ give different streams, however large or negative.
    """
    return float(uniforms(stream_states([(seed, choice)]), np.array([position]))[0])


def stream_states(streams: Sequence[tuple[int, int]]) -> npt.NDArray[np.uint64]:
    """Compute the state from which the numbers of each (seed, choice) are derived, uint64 [len(streams)]."""
    state = np.zeros(len(streams), np.uint64)
    for words in zip(
        *((seed & MASK_64, (seed >> 64) & MASK_64, choice & MASK_64) for seed, choice in streams), strict=True
    ):
        state = _mix(state, np.array(words, np.uint64))
    return state


def uniforms(states: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Compute ``uniform`` of each stream at its position, float64 in [0, 1)."""
    numbers: npt.NDArray[np.float64] = (
        _mix(states, positions.astype(np.uint64)) >> np.uint64(11)
    ) * np.float64(2.0**-53)
    return numbers


def _mix(state: npt.NDArray[np.uint64], word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One round of splitmix64; unsigned arrays wrap around."""
    state = (state ^ word) + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
