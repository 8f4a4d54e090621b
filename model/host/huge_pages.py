"""Memory of the host in huge pages. Imports no torch."""

import contextlib
import mmap
import sys


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of its own, in huge pages as far as the system has them."""
    if sys.platform != "linux":
        return mmap.mmap(-1, num_bytes)
    # Private: shared memory, which is Python's default, gets no huge pages on most systems.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class HugePageMemory:
    """Hands out memory from large pieces in huge pages. Most weights of a block are smaller than a page or
    two of them and would get none; then every 4 KiB cost a walk through page tables and end what the
    processor fetches ahead."""

    PIECE_BYTES = 32 << 20
    ALIGNMENT = 64

    def __init__(self) -> None:
        self._piece = memoryview(b"")

    def take(self, num_bytes: int) -> memoryview:
        """Zeroed, aligned to a cache line; it lives as long as what refers to it."""
        size = max(1, -(-num_bytes // self.ALIGNMENT)) * self.ALIGNMENT
        if size > len(self._piece):
            self._piece = memoryview(anonymous_memory(max(size, self.PIECE_BYTES)))
        taken, self._piece = self._piece[:num_bytes], self._piece[size:]
        return taken
