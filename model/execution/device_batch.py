"""What a device keeps of the running batch from step to step: its block tables, and the tokens drawn last,
both by row."""

import numpy as np
import torch

from model.interface.running_batch import GLOBAL, LOCAL, RunningBatch
from model.network.forward_batch import to_device

NUM_POSITIONS = 1  # positions that a row computes in one step


class DeviceBatch:
    """The device's copy of one RunningBatch. Its methods must be called in the order of the steps."""

    def __init__(self, batch: RunningBatch, device: torch.device, *, mirrors_tables: bool) -> None:
        """Copy the batch's state. ``mirrors_tables``: keep all block tables on the device; otherwise each
        step brings those that it needs."""
        self.batch = batch
        self._device = device
        # [row, position]: tokens drawn by the last step of each row; the next step reads them here without
        # waiting for the host
        self.sampled = torch.zeros(batch.num_rows, NUM_POSITIONS, dtype=torch.int64, device=device)
        self._last_sampled = self.sampled[:, NUM_POSITIONS - 1]
        # int32 [group, row, index]
        self._tables = to_device(batch.blocks.copy(), device) if mirrors_tables else None

    def update_tables(self) -> None:
        """Apply the changes of the block tables that the batch reports. Applying them twice does no harm."""
        rows, indices = self.batch.changes.rows, self.batch.changes.indices
        if self._tables is None or not rows:
            return
        _, num_rows, width = self.batch.blocks.shape
        in_group = np.array(rows) * width + indices
        places = np.concatenate((in_group + GLOBAL * num_rows * width, in_group + LOCAL * num_rows * width))
        entries = self.batch.blocks.reshape(-1)[places]
        both = to_device(np.stack((places, entries)), self._device)  # as int64, so that one copy takes both
        self._tables.view(-1).index_copy_(0, both[0], both[1].int())

    def block_tables(self, rows: torch.Tensor, width: int) -> torch.Tensor:
        """Gather the block tables of these rows -> int32 [group, len(rows), width]."""
        assert self._tables is not None, "this device has no tables of its own"
        return self._tables[:, :, :width].index_select(1, rows)

    def last_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather the tokens that were drawn last in these rows -> int64 [len(rows)]."""
        return self._last_sampled.index_select(0, rows)

    def keep_tokens(self, rows: torch.Tensor, drawn: torch.Tensor) -> None:
        """Keep the tokens int64 [len(rows)] that were drawn in these rows. A negative token, where none could
        be drawn, becomes 0, which the next step can compute."""
        self._last_sampled.index_copy_(0, rows, drawn.clamp(min=0))
