"""Keeps converted tokenizers on disk. An entry is one file whose name holds the key of its source and the
SHA-256 of its own content: it is written under another name and moved into place, so it is whole or absent,
and damage is noticed and repaired. A cache that cannot be written costs a warning, never the start. Imports
no torch.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from model.interface.errors import CheckpointError

logger = logging.getLogger(__name__)

DIGEST_LENGTH = 64
UNFINISHED = ".writing-"
LEFT_OVER_SECONDS = 600.0


def cached_tokenizer(key: str, build: Callable[[], str], cache_dir: Path) -> Path:
    """The cached file of ``key``, or a new one from ``build``. A cache that cannot be written is replaced by
    a temporary file."""
    folder = cache_dir / "tokenizers"
    found = _find(folder, key)
    if found is not None:
        return found
    logger.info("Converting the tokenizer of the GGUF file; later starts read it from %s", folder)
    content = build().encode("utf-8")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write(folder, key, content)
    except OSError as error:
        logger.warning(
            "The converted tokenizer cannot be cached in %s (%s); every start will convert it again. "
            "Set GEMSERVE_CACHE to a writable folder.",
            folder,
            error.strerror or error,
        )
        return _write_temporary(key, content)


def _write_temporary(key: str, content: bytes) -> Path:
    try:
        folder = Path(tempfile.mkdtemp(prefix="gemserve-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return _write(folder, key, content)
    except OSError as error:
        raise CheckpointError(
            f"The converted tokenizer ({len(content) >> 20} MiB) can be written neither to the cache "
            f"nor to {tempfile.gettempdir()}: {error.strerror or error}. "
            "Free some space or set GEMSERVE_CACHE."
        ) from error


def _remove_left_overs(folder: Path) -> None:
    """Of writers that were killed. One that is at work has a young file."""
    for file in folder.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(FileNotFoundError):  # another start was quicker
            if file.stat().st_mtime < time.time() - LEFT_OVER_SECONDS:
                file.unlink()


def _write(folder: Path, key: str, content: bytes) -> Path:
    _remove_left_overs(folder)
    target = folder / f"{key}-{hashlib.sha256(content).hexdigest()}.json"
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=UNFINISHED)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes it private; a cache filled by an image or another user must be readable
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return target


def _find(folder: Path, key: str) -> Path | None:
    """A whole entry of this key. A damaged one is removed if that is possible, and in any case not used."""
    for candidate in sorted(folder.glob(f"{key}-*.json")):
        digest = candidate.stem.removeprefix(f"{key}-")
        try:
            if len(digest) == DIGEST_LENGTH and hashlib.sha256(candidate.read_bytes()).hexdigest() == digest:
                return candidate
            logger.warning("The cached tokenizer %s is damaged and is converted again.", candidate)
            candidate.unlink()
        except OSError as error:
            logger.warning("The cached tokenizer %s cannot be used: %s", candidate, error.strerror or error)
    return None
