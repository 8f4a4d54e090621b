"""The cache on disk: entries are whole or absent, whatever ends their writers."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
from filelock import lock_descriptor

from model.host.disk_cache import DiskCache, default_cache_dir

NAME = "entry.bin"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "deep" / "cache")


def test_the_folder_is_the_one_that_is_asked_for_or_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("GEMSERVE_CACHE", raising=False)
    if sys.platform == "linux":
        assert default_cache_dir() == Path("/somebody/.cache/gemserve")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_cache_dir() == Path("/elsewhere/gemserve")
    monkeypatch.setenv("GEMSERVE_CACHE", "/own")
    assert default_cache_dir() == Path("/own")


def test_an_entry_is_there_once_it_is_whole_for_everybody_to_read(cache: DiskCache) -> None:
    with cache.writing(NAME) as stream:
        stream.write(b"half, ")
        (unfinished,) = cache.folder.iterdir()
        assert unfinished.name.startswith(".writing-entry-")
        assert cache.is_being_written(NAME)
        assert not cache.is_being_written("other.bin")
        stream.write(b"whole")
    assert not cache.is_being_written(NAME)
    assert names(cache.folder) == [NAME]
    assert (cache.folder / NAME).read_bytes() == b"half, whole"
    assert (cache.folder / NAME).stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_leaves_the_old_entry_and_nothing_else(cache: DiskCache) -> None:
    with cache.writing(NAME) as stream:
        stream.write(b"old")
    with pytest.raises(TypeError, match="bytes-like"), cache.writing(NAME) as stream:
        stream.writelines([b"new", "text"])  # type: ignore[list-item]
    assert names(cache.folder) == [NAME]
    assert (cache.folder / NAME).read_bytes() == b"old"


def test_left_overs_go_unless_somebody_may_be_writing_them(cache: DiskCache) -> None:
    cache.folder.mkdir(parents=True)
    ages = {".writing-young": 10, ".writing-killed": 100, ".writing-locked": 100, ".writing-ancient": 4000}
    for name, age in {**ages, NAME: 4000}.items():
        (cache.folder / name).touch()
        os.utime(cache.folder / name, (time.time() - age,) * 2)
    with (
        (cache.folder / ".writing-locked").open("rb") as locked,
        (cache.folder / ".writing-ancient").open("rb") as ancient,
    ):
        assert lock_descriptor(locked.fileno(), blocking=False)
        assert lock_descriptor(ancient.fileno(), blocking=False)
        cache.remove_left_overs()
    assert names(cache.folder) == [".writing-locked", ".writing-young", NAME]


def test_whoever_makes_an_entry_makes_it_alone_and_tidies_after_the_killed(cache: DiskCache) -> None:
    """A process is killed with the lock, a workspace and a half-written file. The next one gets the lock."""
    script = (
        "import sys; from pathlib import Path; from model.host.disk_cache import DiskCache\n"
        f"cache, name = DiskCache(Path({str(cache.folder)!r})), {NAME!r}\n"
        "with cache.locked(name), cache.workspace(name) as folder, cache.writing(name):\n"
        "    (folder / 'object.o').touch()\n"
        "    print(flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder, holder.stdin:
        assert holder.stdout.readline() == "\n"
        with (cache.folder / "entry.lock").open("rb") as lock:
            assert not lock_descriptor(lock.fileno(), blocking=False)
        assert len(names(cache.folder)) == 3
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert len(names(cache.folder)) == 3
    with cache.locked(NAME):
        assert names(cache.folder) == ["entry.lock"]
        with cache.workspace(NAME) as folder:
            assert folder.parent == cache.folder
            assert list(folder.iterdir()) == []
        with cache.writing(NAME):
            pass
    assert names(cache.folder) == [NAME, "entry.lock"]


def test_of_another_entry_nothing_is_tidied(cache: DiskCache) -> None:
    with cache.writing("other.bin"), cache.locked(NAME):
        assert cache.is_being_written("other.bin")


def test_without_locks_entries_are_written_and_age_alone_decides_about_left_overs(
    cache: DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int, *, blocking: bool) -> bool:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(filelock, "lock_descriptor", refused)
    with cache.writing(NAME):
        assert not cache.is_being_written(NAME)
    for name, age in {".writing-old": 100, ".writing-ancient": 4000}.items():
        (cache.folder / name).touch()
        os.utime(cache.folder / name, (time.time() - age,) * 2)
    cache.remove_left_overs()
    assert names(cache.folder) == [".writing-old", NAME]


def test_what_cannot_be_removed_costs_nothing(cache: DiskCache, tmp_path: Path) -> None:
    cache.discard(NAME)
    cache.remove_left_overs()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), DiskCache(tmp_path / "file" / "cache").writing(NAME):
        pytest.fail("there is no such folder")
