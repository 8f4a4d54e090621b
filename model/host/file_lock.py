"""Locks on open files that go with the process, however it ends."""

from typing import IO


def lock_file(stream: IO[bytes]) -> None:
    """Take the file alone. Raises BlockingIOError where another process has it, another OSError where there
    are no locks."""
    import fcntl  # not on Windows

    fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
