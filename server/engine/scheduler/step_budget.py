"""How many tokens a step may have. Imports no torch, keeps no clock of its own.

What prefills may take beside decodes follows from the measured times of steps, so that running streams do not
stall; after a step that the device had no memory for, steps are smaller, and grow again by a token each.
"""

from server.engine.stats import StepStats

# A step that also prefills may take this many times a decode-only step: running streams then pause less than
# five times their usual gap, with room for the noise of the measurement.
MIXED_STEP_RATIO = 3.5
NEWEST_SHARE = 0.2  # of a moving average


class StepBudget:
    """Limits of the next step, in tokens. Neither is ever less than a block or more than
    ``max_num_batched_tokens``."""

    def __init__(self, max_num_batched_tokens: int, block_size: int) -> None:
        self._most = max_num_batched_tokens
        self._least = block_size
        self.max_step_tokens = max_num_batched_tokens  # of a step that prefills
        self.mixed_prefill_tokens = max_num_batched_tokens  # of the prefills in a step that also decodes
        # Moving averages in seconds; None until measured.
        self._decode_step: float | None = None
        self._prefill_token: float | None = None

    def for_prefills(self, num_tokens: int) -> int:
        """What prefills may have in a step that has ``num_tokens`` of decodes. Less than nothing where these
        are too many."""
        left = self.max_step_tokens - num_tokens
        return min(left, self.mixed_prefill_tokens) if num_tokens else left

    def observe(self, step: StepStats) -> None:
        """Learn from the time of a finished step what the prefills of a mixed one may be."""
        if step.kind == "decode":
            self._decode_step = _average(self._decode_step, step.duration)
        else:
            decoding = self._decode_step if step.kind == "mixed" and self._decode_step is not None else 0.0
            prefilling = max(0.0, step.duration - decoding)
            self._prefill_token = _average(self._prefill_token, prefilling / step.num_prefill_tokens)
        if self._decode_step is not None and self._prefill_token:
            self.mixed_prefill_tokens = self._within(
                int((MIXED_STEP_RATIO - 1) * self._decode_step / self._prefill_token)
            )

    def found_memory(self) -> None:
        """The device had memory for a step: the next one may have a token more."""
        self.max_step_tokens = self._within(self.max_step_tokens + 1)

    def found_no_memory(self, num_tokens: int) -> None:
        """It had none for a step of so many tokens: the next one gets half of them."""
        self.max_step_tokens = self._within(num_tokens // 2)

    def _within(self, num_tokens: int) -> int:
        return min(max(num_tokens, self._least), self._most)


def _average(old: float | None, new: float) -> float:
    return new if old is None else (1 - NEWEST_SHARE) * old + NEWEST_SHARE * new
