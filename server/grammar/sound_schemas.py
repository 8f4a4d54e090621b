"""Remembers which JSON schemas were found to be sound, by their content: the requests of one client offer the
same functions in every turn. Safe to use from several threads."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

MAX_REMEMBERED = 4096


class SoundSchemas:
    """The ones that were used last; 32 bytes and a place each."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._digests: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def unknown(self, schemas: Sequence[dict[str, Any]]) -> list[int]:
        """Positions of those that are not known to be sound."""
        digests = [_digest(schema) for schema in schemas]
        with self._lock:
            for digest in digests:
                if digest in self._digests:
                    self._digests.move_to_end(digest)
            return [position for position, digest in enumerate(digests) if digest not in self._digests]

    def add(self, schema: dict[str, Any]) -> None:
        digest = _digest(schema)
        with self._lock:
            self._digests[digest] = None
            while len(self._digests) > self._limit:
                self._digests.popitem(last=False)


def _digest(schema: dict[str, Any]) -> bytes:
    """The order of names counts: it is that of what the model writes."""
    return hashlib.sha256(json.dumps(schema).encode()).digest()
