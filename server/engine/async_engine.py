"""The engine's thread and its door to asyncio: ``generate()`` streams tokens, closing the stream aborts the
request.

Commands go in through an inbox, outputs come back in one thread-safe callback per step. A fault in the step
ends the engine: every open stream gets EngineDeadError, and ``on_death`` is told. So does a step that takes
longer than ``step_timeout``.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TypeVarTuple, Unpack

from server.engine.core import EngineCore
from server.engine.request import (
    EngineDeadError,
    EngineDrainingError,
    EngineError,
    EngineHungError,
    EngineRequest,
    TokenOutput,
)
from server.engine.scheduler.outputs import StepOutputs
from server.engine.stats import EngineStats, StepStats

logger = logging.getLogger("gemserve.engine")

Args = TypeVarTuple("Args")

STALL_SECONDS = 30.0
# How long the end waits for the step that runs. The process can end without it.
STOP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one request may ask for. ``max_model_len`` is the smallest of the model's, the flag's and the
    cache's capacity."""

    max_model_len: int
    max_num_seqs: int
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True)
class _Add:
    spec: EngineRequest
    arrival: float


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class AsyncEngine:
    """Runs an EngineCore in a thread of its own. All public methods belong to one event loop."""

    def __init__(self, core: EngineCore, limits: EngineLimits) -> None:
        self.limits = limits
        self.error: BaseException | None = None
        self.on_step: Callable[[StepStats], None] | None = None  # called in the engine's thread
        self.on_death: Callable[[BaseException], None] | None = None  # called in the event loop
        self.step_timeout = 0.0  # seconds; 0: a step may take for ever. Set before ``start``
        self._core = core
        self._step_number = 0  # odd while a step runs
        self._step_seconds = 0.0  # for how long the watchdog has seen the step that runs
        self._ended = asyncio.Event()  # the thread has ended, or hangs and is not waited for
        self._watchdog: asyncio.Task[None] | None = None
        self._inbox: deque[_Add | _Abort] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._draining = False
        self._streams: dict[str, asyncio.Queue[TokenOutput | EngineError]] = {}
        self._no_streams = asyncio.Event()
        self._no_streams.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="gemserve-engine", daemon=True)

    @property
    def stats(self) -> EngineStats:
        return self._core.stats

    @property
    def is_dead(self) -> bool:
        return self.error is not None

    @property
    def is_ready(self) -> bool:
        return self._loop is not None and not self.is_dead and not self._draining and not self._stopping

    @property
    def is_stalled(self) -> bool:
        """The step that runs takes long, but not yet so long that it counts as hung."""
        return self._step_seconds >= min(STALL_SECONDS, self.step_timeout / 2 or STALL_SECONDS)

    @property
    def has_stopped(self) -> bool:
        """The thread has ended or was never started."""
        return not self._thread.is_alive()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def arrivals_in_inbox(self) -> list[float]:
        """When the requests arrived that the engine's thread takes up after its step. Never waits for a
        step."""
        with self._wake:
            return [command.arrival for command in self._inbox if isinstance(command, _Add)]

    def start(self) -> None:
        """Start the thread; outputs are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watchdog = asyncio.create_task(self._watch_steps())

    async def generate(self, spec: EngineRequest) -> AsyncGenerator[TokenOutput, None]:
        """Stream a request's outputs until its finish reason. Closing the generator aborts the request.

        Raises RequestFailedError when this request alone failed, EngineDeadError and EngineDrainingError as
        they say.
        """
        self._check_open()
        outputs: asyncio.Queue[TokenOutput | EngineError] = asyncio.Queue()
        assert spec.request_id not in self._streams, "request ids are unique among live requests"
        self._streams[spec.request_id] = outputs
        self._no_streams.clear()
        self._send(_Add(spec, time.monotonic()))
        ended = False
        try:
            while not ended:
                item = await outputs.get()
                if isinstance(item, EngineError):
                    raise item
                ended = item.finish_reason is not None
                yield item
        finally:
            del self._streams[spec.request_id]
            if not self._streams:
                self._no_streams.set()
            if not ended:
                self._send(_Abort(spec.request_id))

    def _check_open(self) -> None:
        if self.error is not None:
            raise EngineDeadError("The engine stopped after an internal error; the server must be restarted.")
        if self._draining or self._stopping:
            raise EngineDrainingError("The server is shutting down and takes no new requests.")

    async def drain(self, grace: float) -> None:
        """Take no new requests and wait until the open ones end, at most ``grace`` seconds; the rest get an
        error."""
        self._draining = True
        with contextlib.suppress(TimeoutError):  # what is still open then is ended below
            async with asyncio.timeout(grace):
                await self._no_streams.wait()
        self._fail_streams(EngineDrainingError("The server shut down before this request was finished."))

    def fail(self, error: BaseException) -> None:
        """End the started engine for a fault outside its steps. In any thread."""
        self._call_in_loop(self._die, error)

    async def stop(self) -> None:
        """End the thread after the step it is in; a step that takes long or hangs is not waited for."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):  # ``has_stopped`` says so
                async with asyncio.timeout(STOP_SECONDS):
                    await self._ended.wait()
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _send(self, command: _Add | _Abort) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._step_number += 1
                outputs = self._core.step()
                self._step_number += 1
                if self.on_step is not None and self._core.last_step is not None:
                    self.on_step(self._core.last_step)
                if outputs:
                    self._call_in_loop(self._deliver, outputs)
        # whatever ends this thread ends the engine, and everyone waiting is told
        except BaseException as error:
            logger.exception("the engine stopped after an error in its step")
            self._call_in_loop(self._die, error)
        finally:
            self._call_in_loop(self._ended.set)

    def _take_commands(self) -> bool:
        """Apply the inbox; sleep while there is nothing to do. False when the engine is to stop."""
        with self._wake:
            while not self._inbox and not self._core.has_work and not self._stopping:
                self._wake.wait()
            if self._stopping or self.is_dead:
                return False
            commands = list(self._inbox)
            self._inbox.clear()
        for command in commands:
            if isinstance(command, _Add):
                self._core.add(command.spec, command.arrival)
            else:
                self._core.abort(command.request_id)
        return True

    def _call_in_loop(self, callback: Callable[[Unpack[Args]], None], *args: *Args) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(callback, *args)

    def _deliver(self, outputs: StepOutputs) -> None:
        for request, event in outputs:
            stream = self._streams.get(request.request_id)
            if stream is not None:  # else its client has left and the abort is on its way
                stream.put_nowait(event)

    async def _watch_steps(self) -> None:
        """Counts its own turns in which the same step runs: a process that was suspended has not hung."""
        interval = min(1.0, self.step_timeout / 4 or 1.0)
        last = 0
        while not self.is_dead and not 0 < self.step_timeout <= self._step_seconds:
            await asyncio.sleep(interval)
            number = self._step_number
            self._step_seconds = self._step_seconds + interval if number == last and number % 2 else 0.0
            last = number
        if not self.is_dead:
            logger.critical("a step of the model has not ended after %g seconds", self._step_seconds)
            self._die(
                EngineHungError(f"a step of the model did not end within {self.step_timeout:g} seconds")
            )
            self._ended.set()

    def _die(self, error: BaseException) -> None:
        if self.is_dead:
            return
        self.error = error
        self._fail_streams(EngineDeadError("The engine stopped after an internal error."))
        if self.on_death is not None:
            self.on_death(error)

    def _fail_streams(self, error: EngineError) -> None:
        for outputs in self._streams.values():
            outputs.put_nowait(error)
