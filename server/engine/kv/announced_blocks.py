"""Blocks that running requests are going to compute: whoever waits for one of them need not compute it again.
No torch."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise


class AnnouncedBlocks:
    """A count per content hash, as several requests may compute the same."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

    def __contains__(self, content_hash: bytes) -> bool:
        return content_hash in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def announce(self, content_hashes: Sequence[bytes]) -> None:
        self._counts.update(content_hashes)

    def withdraw(self, content_hashes: Sequence[bytes]) -> None:
        """They have been computed, or will not be."""
        for content_hash in content_hashes:
            self._counts[content_hash] -= 1
            if self._counts[content_hash] <= 0:
                del self._counts[content_hash]

    def last_of_run(self, content_hashes: Sequence[bytes]) -> bytes:
        """Of blocks that begin with an announced one, the last in an unbroken row of such: those of a
        sequence land in order."""
        for content_hash, following in pairwise(content_hashes):
            if following not in self._counts:
                return content_hash
        return content_hashes[-1]
