"""The two files of a batch. The input is checked whole before anything runs. The output grows by one whole
line per answer, so that a run that was ended at any moment goes on where it stopped."""

import contextlib
import errno
import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from model.interface.errors import ModelError
from server.errors import shorten
from server.settings.settings import SettingsError

_MAX_SHOWN_FAULTS = 10
_PATH = re.compile(r"/v1/[A-Za-z0-9._~%:@!$&'()*+,;=/?-]{1,1000}")


class BatchFileError(ModelError):
    """One of the files cannot be read or written on. What was answered is written down."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the input."""

    custom_id: str
    url: str  # a path, such as /v1/chat/completions
    body: dict[str, Any]


def parse_line(line: bytes) -> BatchRequest:
    """Raises ValueError that says what is wrong with the line."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    custom_id, method, url, body = (value.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("custom_id: expected a text")
    if method != "POST":
        raise ValueError(f"method: expected POST, got {shorten(str(method), 40)!r}")
    if not isinstance(url, str) or not _PATH.fullmatch(url):
        raise ValueError(f"url: expected a path such as /v1/chat/completions, got {shorten(str(url), 80)!r}")
    if not isinstance(body, dict):
        raise ValueError("body: expected an object")
    if body.get("stream"):
        raise ValueError("body.stream: answers of a batch are not streamed; leave it out")
    return BatchRequest(custom_id, url, body)


class BatchInput:
    """The input file: read once to check it, then once more line by line as its requests are sent."""

    def __init__(self, path: Path) -> None:
        """Raises SettingsError that lists the lines that are wrong."""
        self._path = path
        self.custom_ids: dict[str, int] = {}  # with the number of its line
        faults = []
        for number, line in self._lines():
            try:
                custom_id = parse_line(line).custom_id
                if custom_id in self.custom_ids:
                    raise ValueError(
                        f"custom_id {shorten(custom_id, 80)!r} is that of line "
                        f"{self.custom_ids[custom_id]} too"
                    )
                self.custom_ids[custom_id] = number
            except ValueError as error:
                faults.append(f"line {number}: {error}")
        if faults:
            shown = "; ".join(faults[:_MAX_SHOWN_FAULTS])
            more = f"; and {len(faults) - _MAX_SHOWN_FAULTS} more" if len(faults) > _MAX_SHOWN_FAULTS else ""
            raise SettingsError(f"{path}: {shown}{more}")

    def requests(self) -> Iterator[BatchRequest]:
        """Raises BatchFileError where the file has changed since it was checked."""
        for number, line in self._lines():
            try:
                yield parse_line(line)
            except ValueError as error:
                raise BatchFileError(f"{self._path}: line {number} has changed: {error}") from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not empty, by number."""
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise SettingsError(f"{self._path}: {error.strerror or error}") from None


class BatchOutput:
    """The output file. ``done`` are the ids that have their answer; a line that was cut off in the middle is
    taken away."""

    def __init__(self, path: Path, batch: BatchInput) -> None:
        """Raises SettingsError for a file that holds anything else than answers to this input."""
        self._path = path
        self.done: set[str] = set()
        with contextlib.ExitStack() as undo:
            try:
                self._file = undo.enter_context(path.open("ab", buffering=0))
                _take_alone(self._file)
                self._file.truncate(self._read(batch))
            except BlockingIOError:
                raise SettingsError(
                    f"{path}: another run is writing to this file; wait for it, or name another file"
                ) from None
            except OSError as error:
                raise SettingsError(f"{path}: {error.strerror or error}") from None
            undo.pop_all()

    def _read(self, batch: BatchInput) -> int:
        """Takes note of the answers that are there; returns where the last whole line ends."""
        end = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    break
                end += len(line)
                try:
                    custom_id = json.loads(line)["custom_id"]
                except (ValueError, TypeError, KeyError, RecursionError):
                    custom_id = None
                if not isinstance(custom_id, str) or custom_id not in batch.custom_ids:
                    raise SettingsError(
                        f"{self._path}: line {number} is no answer to a request of this input; "
                        "name another file, or remove it"
                    )
                self.done.add(custom_id)
        return end

    def write(self, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        """One line, in one call of the system: a process that is killed has written all of it or nothing that
        is read again. Raises BatchFileError when the disk takes no more."""
        line = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        encoded = (
            json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")
            + b"\n"
        )
        try:
            while encoded:
                encoded = encoded[self._file.write(encoded) :]
        except OSError as failure:
            raise BatchFileError(
                f"{self._path}: {failure.strerror or failure}; run the same command again to go on "
                "once that is mended"
            ) from None
        self.done.add(custom_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _take_alone(file: FileIO) -> None:
    """Until it is closed or the process ends. Raises BlockingIOError where another process has it; not every
    system has locks."""
    from filelock import lock_descriptor  # takes longer to import than all else here

    try:
        is_ours = lock_descriptor(file.fileno(), blocking=False)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            raise
        return
    if not is_ours:
        raise BlockingIOError
