"""A ModelRunner for one rank's share of a model. On its own it is what runs on every rank but the first: it computes the network
and its part of the logits in step with the others, and draws nothing.
"""

from collections.abc import Sequence

import torch

from model.batch import ForwardBatch
from model.parallel.group import Group
from model.parallel.layers import DividedHead
from model.runner import MAX_LOGITS_ROWS, ModelRunner, is_out_of_memory, rows_of_logits
from model.sequence_chunk import SequenceChunk


class ShardRunner(ModelRunner):
    """``load`` with a shard, then ``join`` the group that the shard is of."""

    group: Group

    def join(self, group: Group) -> None:
        assert isinstance(self.model.head, DividedHead)
        self.group = group
        group.allocate(MAX_LOGITS_ROWS, max(self.model.head.widths))

    def begin_step(self, chunks: Sequence[SequenceChunk]) -> list[list[int]]:
        """Says what the step's collective operations will be; the rows of each of its slices of logits."""
        slices = rows_of_logits(chunks, self.model.head.num_valid_tokens)
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        reductions = 1 + 2 * self.config.num_hidden_layers  # the embedding, and both halves of each block
        shape = (num_tokens, self.config.hidden_size)
        self.group.begin_step(reductions, shape, self.ops.dtype, [len(rows) for rows in slices])
        return slices

    def take_part(self, chunks: Sequence[SequenceChunk]) -> str | None:
        """One step beside rank 0. A text where there was no memory for it."""
        reason = None
        try:
            self._compute(chunks)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error) or type(error).__name__
        # Not before here: the frames of the caught exception hold the tensors of the failed step.
        self.group.finish_step()
        return reason

    @torch.inference_mode()
    def _compute(self, chunks: Sequence[SequenceChunk]) -> None:
        slices = self.begin_step(chunks)
        hidden = self._forward(chunks)[1]
        for rows in slices:
            self.model.logits(hidden[rows])

    def _forward(self, chunks: Sequence[SequenceChunk]) -> tuple[ForwardBatch, torch.Tensor]:
        result = super()._forward(chunks)
        self.group.network_is_done()
        return result
