"""What rank 0 tells the other ranks, one message at a time; each is answered. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.checkpoint.base import Checkpoint
from model.interface.errors import ModelError

if TYPE_CHECKING:
    from model.network.forward_batch import StepLayout


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

    layout: "StepLayout"  # with tokens and block tables in it


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
