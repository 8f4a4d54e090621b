"""The processes of ranks 1 to N - 1, as rank 0 sees them: started, told, answered, watched and ended. Imports
no torch.

Two connections lead to each. Messages go through the first. The second, the lifeline, holds nothing as long
as both ends live: a rank ends at once when rank 0 closes it, however rank 0 ended, and writes into it why it
ends itself; rank 0 learns of a rank's end from it, whatever rank 0 is waiting for just then.
"""

import contextlib
import json
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from model.interface.errors import ConfigError, ModelError
from model.parallel.messages import Answer
from model.parallel.split import FLAG

WORKER = "model.parallel.worker"
# How long rank 0 waits for news of a rank's end once something broke, and for the ends of ranks that have
# nothing to do.
EXPLAIN_SECONDS = 5.0
END_SECONDS = 2.0
POLL_SECONDS = 1.0
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(*sys.argv[2:])"
)


T = TypeVar("T")
logger = logging.getLogger(__name__)


class RankError(ModelError):
    """A rank has ended, and with it the group."""


@dataclass(slots=True)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    messages: Connection
    lifeline: socket.socket
    watcher: threading.Thread = field(init=False)


class Ranks:
    """Starts the processes, which import torch meanwhile. ``close`` ends them; so does the end of this
    process."""

    def __init__(self, size: int, worker: str = WORKER) -> None:
        """``worker``: the module whose ``main(rank, size, messages, lifeline)`` the processes run."""
        if sys.platform == "win32":
            raise ConfigError(f"{FLAG} {size}: several devices are shared on Linux and macOS alone; use 1.")
        self.size = size
        self.death: RankError | None = None
        self._on_death: Callable[[RankError], None] | None = None
        self._died = threading.Event()
        self._lock = threading.Lock()  # over death and on_death
        self._is_closing = False
        self._ranks = [self._start(number, worker) for number in range(1, size)]
        for rank in self._ranks:
            rank.watcher = threading.Thread(
                target=self._watch, args=(rank,), name=f"gemserve-rank-{rank.number}", daemon=True
            )
            rank.watcher.start()

    @property
    def process_ids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def _start(self, number: int, worker: str) -> _Rank:
        messages, their_messages = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()
        with their_messages, their_lifeline:
            descriptors = (their_messages.fileno(), their_lifeline.fileno())
            arguments = (json.dumps(sys.path), *map(str, (number, self.size, *descriptors)))
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM.format(module=worker), *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                process_group=0,  # a terminal's Ctrl-C is for rank 0
            )
        return _Rank(number, process, Connection(messages.detach()), lifeline)

    # -- talking ---------------------------------------------------------------------------------------------

    def send(self, message: object) -> None:
        """The same message to all. Raises RankError."""
        content = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            for rank in self._ranks:
                rank.messages.send_bytes(content)
        except OSError as error:
            raise self.explain(error) from error

    def answers(self) -> list[Answer]:
        """One of each, in order. Raises RankError, and what the user can mend as it was raised there."""
        answers: list[Answer] = []
        try:
            for rank in self._ranks:
                while not rank.messages.poll(POLL_SECONDS):
                    if self.death is not None:  # this rank may be waiting for the one that has ended
                        raise self.death
                answer: Any = rank.messages.recv()
                assert isinstance(answer, Answer)
                answers.append(answer)
        except (OSError, EOFError) as error:
            raise self.explain(error) from error
        for answer in answers:
            if answer.fault is not None:
                raise answer.fault
        return answers

    # -- the end ---------------------------------------------------------------------------------------------

    def on_death(self, callback: Callable[[RankError], None]) -> None:
        """Have a callback told, in some thread, when a rank has ended."""
        with self._lock:
            self._on_death = callback
            death = self.death
        if death is not None:
            callback(death)

    def explain(self, error: Exception) -> Exception:
        """The end of a rank, where that is what an error comes from; else the error itself."""
        self._died.wait(EXPLAIN_SECONDS)
        return error if self.death is None else self.death

    def guarded(self, work: Callable[[], T]) -> T:
        """What some work gives, or the end of a rank, for which it may wait in vain: it is left to itself
        then."""
        outcome: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                outcome.put((True, work()))
            except BaseException as error:  # raised where it is waited for
                outcome.put((False, error))

        self.on_death(lambda death: outcome.put((False, death)))
        threading.Thread(target=run, name="gemserve-load-rank-0", daemon=True).start()
        succeeded, result = outcome.get()
        if not succeeded:
            raise result
        given: T = result
        return given

    def _watch(self, rank: _Rank) -> None:
        content = b""
        with contextlib.suppress(OSError):
            while piece := rank.lifeline.recv(1 << 16):
                content += piece
        code = rank.process.wait()
        if self._is_closing:
            return
        name = f"rank {rank.number} of {self.size} (process {rank.process.pid})"
        reason = content.decode(errors="replace")
        if reason:
            logger.error("%s failed\n%s", name, reason)
        ending = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        why = (
            reason.splitlines()[-1]
            if reason
            else "the system's log may say why; too little memory is a frequent reason"
        )
        with self._lock:
            if self.death is None:
                self.death = RankError(f"{name} {ending}: {why}")
            death, callback = self.death, self._on_death
        self._died.set()
        if callback is not None:
            callback(death)

    def close(self) -> None:
        """End all ranks, and those that do not by themselves by force."""
        self._is_closing = True
        for rank in self._ranks:
            rank.messages.close()
        deadline = time.monotonic() + END_SECONDS
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
            rank.watcher.join()
            rank.lifeline.close()


def adopt(messages: str, lifeline: str) -> tuple[Connection, socket.socket]:
    """A rank's ends of the two connections. From here on the process ends with rank 0, in whatever code it
    is."""
    ends = Connection(int(messages)), socket.socket(fileno=int(lifeline))

    def end_with_rank_0() -> None:
        with contextlib.suppress(OSError):
            ends[1].recv(1)
        os._exit(1)

    threading.Thread(target=end_with_rank_0, name="gemserve-lifeline", daemon=True).start()
    return ends


def report(lifeline: socket.socket, error: BaseException) -> None:
    """Tell rank 0 why this rank is about to end."""
    with contextlib.suppress(OSError):  # rank 0 has ended before
        lifeline.sendall("".join(traceback.format_exception(error)).strip().encode())
