"""Admission control: how many sequences and prompt tokens may be in the server at once. What is beyond the
limits is refused at once, with a Retry-After worked out from how fast work has been leaving, and what was
refused before is let come back first; what is admitted is admitted whole.

Kept by the event loop, which knows every request from its arrival on: no decision depends on how far the
engine's thread is.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from server.errors import RETRY_AFTER_SECONDS, ApiError, Rejection, server_overloaded

MAX_RETRY_AFTER_SECONDS = 60
MAX_BUFFERED_BODY_BYTES = 256 * 1024 * 1024
# How long what left stays in the measured rate, as the time constant of an exponential average.
_RATE_SECONDS = 30.0


class DrainRate:
    """What left per second, averaged over the recent time in which there was something to leave."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._amount = 0.0
        self._seconds = 0.0
        self._last = clock()

    def restart(self) -> None:
        """Work begins after an idle time, which counts for nothing."""
        self._last = self._clock()

    def observe(self, amount: int) -> None:
        self._amount, self._seconds = self._decayed()
        self._amount += amount
        self._last = self._clock()

    @property
    def per_second(self) -> float:
        """0.0 while nothing was measured."""
        left, seconds = self._decayed()
        return left / seconds if left > 0 and seconds > 0 else 0.0

    def seconds_for(self, amount: float) -> int:
        """Whole seconds until so much has left, within 1 and MAX_RETRY_AFTER_SECONDS; a guess while nothing
        was measured."""
        rate = self.per_second
        if not rate:
            return RETRY_AFTER_SECONDS
        exact = round(amount / rate, 3)
        return math.ceil(min(MAX_RETRY_AFTER_SECONDS, max(1.0, exact)))

    def _decayed(self) -> tuple[float, float]:
        elapsed = self._clock() - self._last
        decay = math.exp(-elapsed / _RATE_SECONDS)
        return self._amount * decay, self._seconds * decay + elapsed


class Crowd:
    """Sequences that were refused and told when to come back, one after the other as fast as work leaves: a
    crowd that came back all at once, again and again, would cost the time that the admitted need."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._amount = 0.0
        self._last = clock()

    def join(self, amount: int, per_second: float) -> float:
        """How much is expected back before ``amount`` more. Nobody is sent away for longer than the longest
        Retry-After."""
        now = self._clock()
        ahead = min(self._amount, per_second * MAX_RETRY_AFTER_SECONDS) - per_second * (now - self._last)
        ahead = max(0.0, ahead)
        self._amount, self._last = ahead + amount, now
        return ahead


class AdmissionControl:
    """``max_queued_requests`` sequences may wait besides those that can run; ``max_queued_prompt_tokens``
    prompt tokens may wait to be computed. 0: no limit."""

    def __init__(
        self,
        max_queued_requests: int,
        max_queued_prompt_tokens: int,
        status: int = 429,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_queued_requests = max_queued_requests
        self.num_requests = 0
        self.num_tokens = 0
        self._max_queued_prompt_tokens = max_queued_prompt_tokens
        self._num_body_bytes = 0
        self._num_text_works = 0
        self._status = status
        self._request_rate = DrainRate(clock)
        self._token_rate = DrainRate(clock)
        self._crowd = Crowd(clock)

    def ticket(self, running_limit: int) -> "Ticket":
        """A ticket for one HTTP request, still without work. ``running_limit``: sequences that the engine can
        run at once."""
        return Ticket(self, running_limit)

    def check_requests(self, num_requests: int, running_limit: int) -> None:
        """Raises ApiError when so many more are beyond the limit. What alone is larger than it waits for an
        empty queue."""
        limit = running_limit + self.max_queued_requests
        excess = self.num_requests + num_requests - limit
        fits_alone = num_requests <= limit
        if self.max_queued_requests and excess > 0 and (fits_alone or self.num_requests > running_limit):
            message = (
                f"The server is at its limit of {self.max_queued_requests} waiting requests. Try again later."
            )
            ahead = self._crowd.join(num_requests, self._request_rate.per_second)
            raise self._refusal(
                message, self._request_rate.seconds_for(min(excess, self.num_requests) + ahead), "queue_full"
            )

    def check_tokens(self, num_tokens: int) -> None:
        """The same for prompt tokens."""
        budget = self._max_queued_prompt_tokens
        excess = self.num_tokens + num_tokens - budget
        if budget and excess > 0 and self.num_tokens:
            message = f"The server is at its limit of {budget} waiting prompt tokens. Try again later."
            raise self._refusal(
                message, self._token_rate.seconds_for(min(excess, self.num_tokens)), "token_budget"
            )

    def _refusal(self, message: str, retry_after: int, reason: Rejection) -> ApiError:
        return server_overloaded(self._status, message, retry_after, reason)

    def body(self) -> "BodyTicket":
        """For one request's body, of unknown size. A context manager."""
        return BodyTicket(self)

    def hold_body_bytes(self, num_bytes: int) -> None:
        """So many more; negative: given back. Raises ApiError when all bodies take too much memory; they
        count all the same."""
        self._num_body_bytes += num_bytes
        if num_bytes > 0 and self._num_body_bytes > MAX_BUFFERED_BODY_BYTES:
            message = "The server holds too many large requests at once. Try again later."
            raise self._refusal(message, RETRY_AFTER_SECONDS, "queue_full")

    @contextlib.contextmanager
    def text_work(self) -> Iterator[None]:
        """Around the encoding or decoding of a text for its own sake, of which as many may wait as requests
        of generation. Raises ApiError."""
        if 0 < self.max_queued_requests <= self._num_text_works:
            message = (
                f"The server is at its limit of {self.max_queued_requests} texts in work. Try again later."
            )
            raise self._refusal(message, 1, "queue_full")
        self._num_text_works += 1
        try:
            yield
        finally:
            self._num_text_works -= 1

    def enter(self, num_requests: int, num_tokens: int) -> None:
        if self.num_requests == 0:
            self._request_rate.restart()
        if self.num_tokens == 0:
            self._token_rate.restart()
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def leave(self, num_requests: int, num_tokens: int, *, measure: bool) -> None:
        """``measure``: it is work that was done or given up, and tells how fast the queue moves."""
        self.num_requests -= num_requests
        self.num_tokens -= num_tokens
        assert self.num_requests >= 0
        assert self.num_tokens >= 0
        if measure and num_requests:
            self._request_rate.observe(num_requests)
        if measure and num_tokens:
            self._token_rate.observe(num_tokens)


class BodyTicket:
    """The memory of one request's body, from its first byte until the request is answered or its stream
    begins."""

    def __init__(self, control: AdmissionControl) -> None:
        self._control = control
        self._num_bytes = 0

    def __enter__(self) -> "BodyTicket":
        return self

    def __exit__(self, *exception: object) -> None:
        self._control.hold_body_bytes(-self._num_bytes)

    def arrived(self, num_bytes: int) -> None:
        """A part came in. Raises ApiError."""
        self._num_bytes += num_bytes
        self._control.hold_body_bytes(num_bytes)


class Ticket:
    """What one HTTP request holds. ``close`` gives all of it back and may be called at any time, more than
    once."""

    def __init__(self, control: AdmissionControl, running_limit: int) -> None:
        self._control = control
        self._running_limit = running_limit
        self._num_requests = 0
        self._num_tokens = 0
        self._started = False

    def admit(self, num_requests: int, num_tokens: int) -> None:
        """Take a place for so many sequences and prompt tokens, or raise ApiError. Once, before anything is
        encoded; the tokens are then a lower bound."""
        self._control.check_requests(num_requests, self._running_limit)
        self._control.check_tokens(num_tokens)
        self._hold(num_requests, num_tokens)

    def start(self, num_requests: int, num_tokens: int) -> None:
        """The exact numbers, before the engine gets the work. Raises ApiError when the tokens turn out to be
        too many."""
        self._control.leave(self._num_requests, self._num_tokens, measure=False)
        self._num_requests = self._num_tokens = 0
        self._control.check_tokens(num_tokens)
        self._hold(num_requests, num_tokens)
        self._started = True

    def sequence_ended(self) -> None:
        self._leave(1, 0)

    def prompt_computed(self, num_tokens: int) -> None:
        self._leave(0, num_tokens)

    def close(self) -> None:
        self._leave(self._num_requests, self._num_tokens)

    def _hold(self, num_requests: int, num_tokens: int) -> None:
        self._control.enter(num_requests, num_tokens)
        self._num_requests, self._num_tokens = num_requests, num_tokens

    def _leave(self, num_requests: int, num_tokens: int) -> None:
        num_requests, num_tokens = min(num_requests, self._num_requests), min(num_tokens, self._num_tokens)
        self._num_requests -= num_requests
        self._num_tokens -= num_tokens
        self._control.leave(num_requests, num_tokens, measure=self._started)
