"""What a block of the prefix cache is known by: a chain of sha256 over salt and tokens, so that a hash names
the block's content and everything before it. Imports no torch."""

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct


class BlockHasher:
    """Hashes full blocks, each as often as it is asked to."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pack = Struct(f"{block_size}I").pack

    def extend(
        self, hashes: list[bytes], token_ids: Sequence[int], cache_salt: str | None, count: int
    ) -> None:
        """Bring the hashes of a sequence's first blocks to ``count``. It has the tokens of as many blocks."""
        size = self._block_size
        while len(hashes) < count:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else chain_root(cache_salt)
            content = self._pack(*token_ids[start : start + size])
            hashes.append(hash_block(parent, content))


def chain_root(cache_salt: str | None) -> bytes:
    """Where a chain starts. Hashed twice: no salt can look like a parent and tokens, whose input is
    longer."""
    return hash_block(b"", sha256((cache_salt or "").encode()).digest())


def hash_block(parent: bytes, content: bytes) -> bytes:
    """Identity of a block's content and everything before it."""
    return sha256(parent + content).digest()
