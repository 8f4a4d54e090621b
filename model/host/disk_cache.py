"""What is kept on disk from one start to the next: the folder, and entries that are whole or absent.

An entry is a file. It is written under another name, which says that it is being written, and moved into
place, so a start that is killed leaves nothing half-written under the entry's own name. What it leaves under
the other name is removed by a later start. What an entry holds, and how damage to it is noticed, is the
business of those who keep it: tokenizers, packed weights, compiled kernels.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".writing-"  # begins the name of what is being written; the entry's name follows
# A file younger than this may have no lock yet, and one older than that belongs to nobody, locked or not.
JUST_MADE_SECONDS, ABANDONED_SECONDS = 60.0, 3600.0


def default_cache_dir() -> Path:
    """$GEMSERVE_CACHE, else the user's folder for caches: $XDG_CACHE_HOME/gemserve, else
    ~/.cache/gemserve."""
    if own := os.environ.get("GEMSERVE_CACHE"):
        return Path(own)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("gemserve"))


class DiskCache:
    """The entries of one folder, which need not exist yet. A folder that cannot be written to is an OSError
    of whatever writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """A new file that becomes the entry when the block ends, and is gone if it fails. It is locked
        meanwhile, where there are locks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(dir=self.folder, prefix=_unfinished(name))
        try:
            with os.fdopen(descriptor, "wb") as stream:
                with contextlib.suppress(OSError):  # a file system without locks
                    _lock(stream)
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
                # mkstemp makes it private; a cache filled by an image or another user must be readable
                os.chmod(unfinished, 0o644)
                os.replace(unfinished, self.folder / name)
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise

    def is_being_written(self, name: str) -> bool:
        """Whether somebody is in ``writing`` of this entry, as far as locks can tell."""
        for file in self.folder.glob(f"{_unfinished(name)}*"):
            with contextlib.suppress(OSError), file.open("rb") as stream:
                if not _lock(stream):
                    return True
        return False

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Wait until this process is the only one that makes the entry. What others have left half-written of
        it is removed. The lock goes with the process, however it ends; its file stays."""
        from filelock import FileLock  # takes longer to import than all else here

        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / Path(name).with_suffix(".lock")):
            for left_over in self.folder.glob(f"{_unfinished(name)}*"):
                if left_over.is_dir():
                    shutil.rmtree(left_over, ignore_errors=True)
                else:
                    left_over.unlink(missing_ok=True)
            yield

    @contextlib.contextmanager
    def workspace(self, name: str) -> Iterator[Path]:
        """An empty folder for what is needed to make the entry, for the block alone. To be used in
        ``locked``."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=_unfinished(name)) as folder:
            yield Path(folder)

    def remove_left_overs(self) -> None:
        """Remove files of writers that were killed, whatever entry they were for."""
        for file in self.folder.glob(f"{UNFINISHED}*"):
            with contextlib.suppress(OSError), file.open("rb") as stream:  # OSError: nobody can know
                age = time.time() - os.fstat(stream.fileno()).st_mtime
                if age > ABANDONED_SECONDS or (age > JUST_MADE_SECONDS and _lock(stream)):
                    file.unlink()

    def discard(self, name: str) -> None:
        """Remove an entry that is of no use, if that is possible."""
        with contextlib.suppress(OSError):
            (self.folder / name).unlink()


def _unfinished(name: str) -> str:
    return f"{UNFINISHED}{Path(name).stem}-"


def _lock(stream: BinaryIO) -> bool:
    """Lock an open file until it is closed. False: another process has it. Raises OSError where there are no
    locks."""
    from filelock import lock_descriptor

    return lock_descriptor(stream.fileno(), blocking=False)
