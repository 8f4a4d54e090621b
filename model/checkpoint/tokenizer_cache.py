"""Keeps converted tokenizers on disk. The name of an entry holds the key of its source and the SHA-256 of its
own content, so damage is noticed and repaired. A cache that cannot be written costs a warning, never the
start. Imports no torch.
"""

import atexit
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from model.host.disk_cache import DiskCache
from model.interface.errors import CheckpointError

logger = logging.getLogger(__name__)

DIGEST_LENGTH = 64


def cached_tokenizer(key: str, build: Callable[[], str], cache_dir: Path) -> Path:
    """The cached file of ``key``, or a new one from ``build``. A cache that cannot be written is replaced by
    a temporary file."""
    cache = DiskCache(cache_dir / "tokenizers")
    found = _find(cache, key)
    if found is not None:
        return found
    logger.info("Converting the tokenizer of the GGUF file; later starts read it from %s", cache.folder)
    content = build().encode("utf-8")
    try:
        return _write(cache, key, content)
    except OSError as error:
        logger.warning(
            "The converted tokenizer cannot be cached in %s (%s); every start will convert it again. "
            "Set GEMSERVE_CACHE to a writable folder.",
            cache.folder,
            error.strerror or error,
        )
        return _write_temporary(key, content)


def _write_temporary(key: str, content: bytes) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="gemserve-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _write(DiskCache(folder), key, content)
    except OSError as error:
        raise CheckpointError(
            f"The converted tokenizer ({len(content) >> 20} MiB) can be written neither to the cache "
            f"nor to {tempfile.gettempdir()}: {error.strerror or error}. "
            "Free some space or set GEMSERVE_CACHE."
        ) from error


def _write(cache: DiskCache, key: str, content: bytes) -> Path:
    cache.remove_left_overs()
    name = f"{key}-{hashlib.sha256(content).hexdigest()}.json"
    with cache.writing(name) as stream:
        stream.write(content)
    return cache.folder / name


def _find(cache: DiskCache, key: str) -> Path | None:
    """A whole entry of this key. A damaged one is removed if that is possible, and in any case not used."""
    for candidate in sorted(cache.folder.glob(f"{key}-*.json")):
        digest = candidate.stem.removeprefix(f"{key}-")
        try:
            if len(digest) == DIGEST_LENGTH and hashlib.sha256(candidate.read_bytes()).hexdigest() == digest:
                return candidate
            logger.warning("The cached tokenizer %s is damaged and is converted again.", candidate)
            cache.discard(candidate.name)
        except OSError as error:
            logger.warning("The cached tokenizer %s cannot be used: %s", candidate, error.strerror or error)
    return None
