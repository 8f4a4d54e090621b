"""The collective operations of one rank: gloo between CPUs, NCCL between CUDA devices. A process has one group at a time.

In a step every rank must take part in every collective operation, in the same order, or all of them wait for ever. A rank that
runs out of memory in the middle of a step therefore goes through the rest of them with zeros (``finish_step``), and tells
afterwards that its results are worthless.
"""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)  # the engine's own watchdog is far quicker; this one ends a rank that was forgotten
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class Group:
    """One rank's view. All ranks are processes of one machine."""

    def __init__(self, rank: int, size: int, device: torch.device, rendezvous: Path) -> None:
        """``rendezvous``: a file that does not exist yet, the same for all ranks, in a folder of this user alone."""
        self.rank = rank
        self.size = size
        self.device = device
        self._reductions = 0  # what is left of the step
        self._reduced_shape = (0, 0)
        self._reduced_dtype = torch.float32
        self._gathers: list[int] = []
        self._sent = torch.empty(0)
        self._received: list[torch.Tensor] = []  # one per rank, on rank 0
        self._uses_nccl = device.type == "cuda"
        # Else gloo listens where the machine's name leads to, which may be every network that it is in.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK.get(sys.platform, "lo"))
        dist.init_process_group(
            "nccl" if self._uses_nccl else "gloo",
            init_method=rendezvous.as_uri(),
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=device if self._uses_nccl else None,
        )

    def allocate(self, max_rows: int, width: int) -> None:
        """Memory to gather logits in, taken once, so that it is there when there is none left."""
        shape = (1 + self.size if self.rank == 0 else 1, max_rows, width)
        self._sent, *self._received = torch.empty(shape, dtype=torch.float32, device=self.device)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(tensor)
        self._reductions -= 1
        return tensor

    def gather_columns(self, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Columns float32 [r, widths[rank]] of every rank -> [r, sum(widths)] on rank 0, None on the others."""
        num_rows, width = columns.shape
        sent = self._sent[:num_rows]
        if width == sent.shape[1]:
            sent = columns.contiguous()
        else:
            sent[:, :width] = columns  # what stands beyond is cut off again
        self._gather(sent)
        if self.rank:
            return None
        return torch.cat([part[:num_rows, :width] for part, width in zip(self._received, widths, strict=True)], dim=1)

    def _gather(self, sent: torch.Tensor) -> None:
        received = [part[: len(sent)] for part in self._received]
        dist.gather(sent, received if self.rank == 0 else None)
        if self._gathers:
            self._gathers.pop(0)

    # -- steps -----------------------------------------------------------------------------------------------------------------

    def begin_step(self, reductions: int, shape: tuple[int, int], dtype: torch.dtype, gathers: Sequence[int]) -> None:
        """What the step consists of: sums of tensors of one shape, then as many rows of logits at a time."""
        self._reductions, self._reduced_shape, self._reduced_dtype, self._gathers = reductions, shape, dtype, list(gathers)

    def network_is_done(self) -> None:
        """All sums are done, also those that a captured graph made unseen."""
        self._reductions = 0

    def finish_step(self) -> None:
        """Take part in what is left of the step, with zeros."""
        if self._reductions > 0:
            zeros = torch.zeros(self._reduced_shape, dtype=self._reduced_dtype, device=self.device)
            while self._reductions > 0:
                self.all_reduce(zeros)
        while self._gathers:
            self._gather(self._sent[: self._gathers[0]])

    def close(self) -> None:
        """For another group in this process. NCCL is left to the end of the process: with ranks that are gone it may wait."""
        if not self._uses_nccl:
            dist.destroy_process_group()
