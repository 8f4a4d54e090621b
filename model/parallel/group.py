"""The collective operations of one rank: gloo between CPUs, NCCL between CUDA devices. A process has one
group at a time.

Every rank must take part in every collective operation, in the same order, or all of them wait for ever. A
rank that runs out of memory in the middle of the network therefore goes through the rest of its sums with
zeros (``finish_step``), and tells afterwards that its results are worthless.
"""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# the engine's own watchdog is far quicker; this one ends a rank that was forgotten
TIMEOUT = timedelta(minutes=30)
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class Group:
    """One rank's view. All ranks are processes of one machine."""

    def __init__(self, rank: int, size: int, device: torch.device, rendezvous: Path) -> None:
        """``rendezvous``: a file that does not exist yet, the same for all ranks, in a folder of this user
        alone."""
        self.rank = rank
        self.size = size
        self.device = device
        self._reductions = 0  # what is left of the step
        self._reduced_shape = (0, 0)
        self._reduced_dtype = torch.float32
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

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(tensor)
        self._reductions -= 1
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's tensor to the others, in place."""
        dist.broadcast(tensor, 0)

    def gather(self, tensor: torch.Tensor, received: Sequence[torch.Tensor]) -> None:
        """Every rank's tensor to rank 0's ``received``, which is empty on the others."""
        dist.gather(tensor, list(received) if self.rank == 0 else None)

    # -- steps -----------------------------------------------------------------------------------------------

    def begin_step(self, reductions: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
        """The network of a step sums up so many tensors of one shape."""
        self._reductions, self._reduced_shape, self._reduced_dtype = reductions, shape, dtype

    def network_is_done(self) -> None:
        """All sums are done, also those that a captured graph made unseen."""
        self._reductions = 0

    def finish_step(self) -> None:
        """Take part in the sums that are left, with zeros."""
        if self._reductions > 0:
            zeros = torch.zeros(self._reduced_shape, dtype=self._reduced_dtype, device=self.device)
            while self._reductions > 0:
                self.all_reduce(zeros)

    def close(self) -> None:
        """For another group in this process. NCCL is left to the end of the process: with ranks that are gone
        it may wait."""
        if not self._uses_nccl:
            dist.destroy_process_group()
