"""A device that takes no time, to measure what a step costs the host: a real ModelRunner over a network and
operations that return tensors made beforehand. Batches are laid out and draws prepared as for a real model;
nothing is computed or written."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from model.config.gemma3_config import SIZES
from model.execution.runner import MAX_LOGITS_ROWS_ON_DEVICE, ModelRunner
from model.interface.kv_cache_spec import KVCachePlan
from model.network.forward_batch import ForwardBatch
from model.network.kv_cache import KVCache
from model.ops.reference import ReferenceOps

if TYPE_CHECKING:
    from model.network.gemma3 import Gemma3

CPU = torch.device("cpu")
TOKEN_ID = 1000  # what is always drawn
MAX_ROWS = 4096


class StubOps(ReferenceOps):
    """Draws made-up tokens, from logits of any width."""

    def __init__(self) -> None:
        super().__init__(CPU, torch.float32)
        self._finite = torch.ones(MAX_ROWS, dtype=torch.bool)
        self._token_ids = torch.full((MAX_ROWS,), TOKEN_ID)

    def all_finite(self, logits: torch.Tensor) -> torch.Tensor:
        return self._finite[: len(logits)]

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return self._token_ids[: len(logits)]

    def draw(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        return self._token_ids[: len(logits)]


class StubNetwork:
    """Stands for Gemma3: tells when it is called, and that is when the host has done all that comes before
    the device's work."""

    def __init__(self, on_call: Callable[[], None]) -> None:
        self.config = SIZES["270m"]
        self.weight_bytes = 0
        self._on_call = on_call
        self._hidden = torch.zeros(MAX_ROWS, 1)

    def __call__(self, batch: ForwardBatch, cache: KVCache) -> torch.Tensor:
        self._on_call()
        return self._hidden[: len(batch.token_ids)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def greedy(self, hidden: torch.Tensor) -> None:
        """The long way."""


def stub_runner(block_size: int = 16, on_call: Callable[[], None] = lambda: None) -> ModelRunner:
    """A runner with the shape of the 270M. ``on_call`` is called when a step's batch is handed to the
    device."""
    network = StubNetwork(on_call)
    runner = ModelRunner(cast("Gemma3", network), network.config.kv_cache_spec(block_size, 2), StubOps())
    runner.max_logits_rows = MAX_LOGITS_ROWS_ON_DEVICE
    runner.sampler.may_wait = False
    runner.allocate_cache(KVCachePlan(1, 1, 0, 0, 0))
    return runner
