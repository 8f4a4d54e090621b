"""How long a step of one replica takes, as a model fitted to measured steps: the network over all tokens of
the step, the head and the draw of every sequence that gets a token, and the reading of earlier keys. Kept as
a JSON profile with the machine it was measured on. Imports no torch."""

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from model.interface.kv_cache_spec import KVCacheSpec
from model.interface.sequence_chunk import StepInput


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds at measured counts, straight lines between them, the last line's slope beyond."""

    counts: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.counts) < 2 or len(self.counts) != len(self.seconds):
            raise ValueError("a curve needs at least two counts, and a time for each")
        if any(left >= right for left, right in pairwise(self.counts)):
            raise ValueError(f"the counts of a curve must rise: {self.counts}")

    def at(self, count: int) -> float:
        right = min(max(1, bisect_left(self.counts, count)), len(self.counts) - 1)
        x0, x1, y0, y1 = (
            self.counts[right - 1],
            self.counts[right],
            self.seconds[right - 1],
            self.seconds[right],
        )
        return max(0.0, y0 + (count - x0) * (y1 - y0) / (x1 - x0))


def keys_read(start: int, num_tokens: int, spec: KVCacheSpec) -> float:
    """Keys that so many tokens from position ``start`` on read, added up over all layers."""
    mean = start + (num_tokens + 1) / 2
    return num_tokens * (
        spec.num_global_layers * mean + spec.num_local_layers * min(mean, spec.sliding_window)
    )


@dataclass(frozen=True, slots=True)
class StepTiming:
    """``network``: by tokens in the step. ``head``: by sequences that get a token, from 0. ``key_read``: by
    keys read."""

    network: Curve
    head: Curve
    key_read: float

    def seconds(self, step: StepInput, spec: KVCacheSpec) -> float:
        sampled = len(step.decodes) + sum(chunk.samples for chunk in step.prefills)
        keys = sum((keys_read(start, 1, spec) for start in step.starts.tolist()), 0.0)
        for chunk in step.prefills:
            keys += keys_read(chunk.start, len(chunk.token_ids), spec)
        return self.network.at(step.num_tokens) + self.head.at(sampled) + self.key_read * keys


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one machine: what a replica of it is made of, and how long its steps take."""

    model: str
    machine: str
    spec: KVCacheSpec
    num_global_blocks: int
    num_local_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    timing: StepTiming
    request_seconds: float  # of the event loop, to read, check and encode one request

    @property
    def capacity_tokens(self) -> int:
        return (self.num_global_blocks - 1) * self.spec.block_size

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> "Profile":
        """Raises ValueError for a file that is no profile."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            timing = values.pop("timing")
            curves = {
                name: Curve(**{key: tuple(row) for key, row in timing[name].items()})
                for name in ("network", "head")
            }
            spec = KVCacheSpec(**values.pop("spec"))
            return cls(**values, spec=spec, timing=StepTiming(**curves, key_read=timing["key_read"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file} is no profile: {error}; make one with python -m deploy.scaling measure"
            ) from error
