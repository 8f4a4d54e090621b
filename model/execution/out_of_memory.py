"""How a lack of memory is told from other faults of torch, and what it is turned into for people."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from model.interface.errors import ConfigError
from model.interface.sequence_chunk import StepMemoryError


@contextmanager
def remedy(what: str, how: str) -> Iterator[None]:
    """Turn a lack of memory while ``what`` is made into an error that says which setting to change."""
    try:
        yield
    except (MemoryError, RuntimeError, StepMemoryError) as error:
        if isinstance(error, StepMemoryError) or is_out_of_memory(error):
            raise ConfigError(f"The device has no room for {what}. {how}") from error
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is a lack of memory. torch has a type for it on CUDA alone; on CPUs only the text
    tells."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return any(
        text in str(error)
        for text in ("can't allocate memory", "not enough memory", "Cannot allocate memory")
    )
