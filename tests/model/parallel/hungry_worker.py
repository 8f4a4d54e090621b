"""A rank that finds no memory in the middle of a step of HUNGRY tokens, and none for HUNGRY_ROWS rows of
logits."""

from typing import NoReturn

import torch

from model.network.gemma3 import MLP
from model.network.layers import Head
from model.parallel import worker

HUNGRY, HUNGRY_ROWS = 7, 5
_calls = iter(range(1 << 30))


def main(*arguments: str) -> NoReturn:
    forward = MLP.forward

    def hungry(self: MLP, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] == HUNGRY and next(_calls) % 3 == 2:
            raise torch.OutOfMemoryError("no memory for what is between the layers")
        return forward(self, hidden)

    head = Head.forward

    def hungry_head(self: Head, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == HUNGRY_ROWS:
            raise torch.OutOfMemoryError("no memory for logits")
        return head(self, x)

    MLP.forward, Head.forward = hungry, hungry_head  # type: ignore[method-assign]
    worker.main(*arguments)
