"""A ModelRunner for one rank's share of a model. On its own it is what runs on every rank but the first: it
computes the network and its part of the logits in step with the others, and draws nothing.
"""

from collections.abc import Callable

import torch

from model.execution.device_batch import DeviceBatch
from model.execution.out_of_memory import is_out_of_memory
from model.execution.runner import ModelRunner
from model.network.forward_batch import StepLayout
from model.parallel.group import Group
from model.parallel.layers import DividedHead


class ShardRunner(ModelRunner):
    """``load`` with a shard, then ``join`` the group that the shard is of."""

    group: Group
    head: DividedHead

    def join(self, group: Group) -> None:
        assert isinstance(self.model.head, DividedHead)
        self.group, self.head = group, self.model.head
        self.mirrors_tables = False  # each step brings tokens and tables for all ranks

    def take_part(self, layout: StepLayout) -> str | None:
        """The network of one step beside rank 0. A text where there was no memory for it."""
        reason = _lack_of_memory(lambda: self._forward(layout, None))
        # Not before here: the frames of the exception held the tensors of the failed step.
        self.group.finish_step()
        return reason

    def take_part_in_logits(self, num_rows: int) -> str | None:
        """The same for logits of hidden states that rank 0 sends."""
        return _lack_of_memory(lambda: self.head.take_part(num_rows))

    @torch.inference_mode()
    def _forward(self, layout: StepLayout, on_device: DeviceBatch | None) -> torch.Tensor:
        num_tokens = len(layout.positions)
        reductions = 1 + 2 * self.config.num_hidden_layers  # the embedding, and both halves of each block
        self.group.begin_step(reductions, (num_tokens, self.config.hidden_size), self.ops.dtype)
        hidden = super()._forward(layout, on_device)
        self.group.network_is_done()
        return hidden


@torch.inference_mode()
def _lack_of_memory(work: Callable[[], object]) -> str | None:
    try:
        work()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return str(error) or type(error).__name__
    return None
