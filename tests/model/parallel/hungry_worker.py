"""A rank that finds no memory in the middle of a step of HUNGRY tokens."""

from typing import NoReturn

import torch

from model.gemma3 import MLP
from model.parallel import worker

HUNGRY = 7
_calls = iter(range(1 << 30))


def main(*arguments: str) -> NoReturn:
    forward = MLP.forward

    def hungry(self: MLP, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] == HUNGRY and next(_calls) % 3 == 2:
            raise torch.OutOfMemoryError("no memory for what is between the layers")
        return forward(self, hidden)

    MLP.forward = hungry  # type: ignore[method-assign]
    worker.main(*arguments)
