"""What rank 0 tells the other ranks, one message at a time; each is answered. Imports no torch."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.checkpoint.base import Checkpoint
from model.interface.errors import ModelError
from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import SequenceChunk


@dataclass(frozen=True, slots=True)
class Connect:
    """Join the group of all ranks."""

    device_type: str
    rendezvous: Path


@dataclass(frozen=True, slots=True)
class Load:
    """Load this rank's part of a model, with the arguments of ``ModelRunner.load``."""

    checkpoint: Checkpoint  # to be opened again
    num_valid_tokens: int
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """Call a method of the loaded runner as rank 0 does at the same time."""

    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Compute the network of one step."""

    chunks: list[SequenceChunk]  # as far as they matter to the network


@dataclass(frozen=True, slots=True)
class Logits:
    """Compute logits of so many hidden states, which are sent next."""

    num_rows: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A rank has done what it was told. ``fault``: not, for a reason that the user can mend; ``no_memory``: a
    step found none."""

    free_memory: int = 0
    fault: ModelError | None = None
    no_memory: str | None = None


_ANY = SamplingParams(max_tokens=0)


def network_part(chunk: SequenceChunk) -> SequenceChunk:
    """A chunk with what decides what the network computes, packed for the way; everything else is rank 0's
    business."""
    return SequenceChunk(
        token_ids=_packed(chunk.token_ids),
        start=chunk.start,
        global_block_table=_packed(chunk.global_block_table),
        local_block_table=_packed(chunk.local_block_table),
        sampling=_ANY,
        samples=False,
    )


def _packed(numbers: Sequence[int]) -> "array[int]":
    return array("i", numbers)
