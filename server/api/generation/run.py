"""From a plan (prompts x choices) to one stream of events, the same for all endpoints, streamed or not.

Every choice runs as a request of its own in the engine and is turned into text here. ``next_event`` hands out
what happened, in order of arrival. When the client leaves, one choice fails, or the run is closed, every open
request is aborted.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from starlette.types import Receive
from typing_extensions import TypedDict

from model.interface.sampling_params import SamplingParams
from model.interface.sequence_chunk import TokenLogprobs
from server.admission import Ticket
from server.api.generation.plan import GenerationPlan
from server.engine.async_engine import AsyncEngine
from server.engine.request import (
    EngineDrainingError,
    EngineError,
    EngineRequest,
    FinishReason,
    RequestExpiredError,
    RequestFailedError,
    TokenOutput,
)
from server.errors import ApiError, ClientDisconnectedError, internal_error, request_timeout, shutting_down
from server.observability.request_metrics import ChoiceRecord, PhaseTimes, RequestRecord
from server.text.detokenizer import Detokenizer
from server.text.tokenizer import Tokenizer
from server.text.tool_calls.call_parser import CallParser, Part

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

logger = logging.getLogger("gemserve.api")

# Of a choice: as the engine says it, or that the text called functions.
ChoiceFinish = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """What one step of the engine meant for one choice; ``index`` is prompt index x n + choice.

    ``token_ids`` are the tokens that count, end and stop tokens included, none behind a stop string;
    ``logprobs`` belong to them one by one. ``parts`` are text and pieces of calls, in their order; there are
    none while a part of a character, of a stop string or of what may become a call is held back.
    """

    index: int
    parts: Sequence[Part]
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    prompt_logprobs: Sequence[TokenLogprobs] | None
    is_first: bool
    finish_reason: ChoiceFinish | None
    stop_text: str | None = None  # the stop string that ended the text
    mean_hidden: "npt.NDArray[np.float64] | None" = None  # [h], where the plan pools

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class UsageSchema(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


@dataclass(slots=True)
class Usage:
    """Tokens and times of the whole request so far. A prompt counts once, whatever n is. ``is_over``: no
    choice has more."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    is_over: bool = False

    def wire(self) -> UsageSchema:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _ChoiceText:
    """Turns the outputs of one request in the engine into events."""

    def __init__(self, tokenizer: Tokenizer, plan: GenerationPlan, sampling: SamplingParams) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=plan.stop,
            include_stop=plan.include_stop,
            skip_special_tokens=plan.skip_special_tokens,
            min_tokens=sampling.min_tokens,
        )
        self._shows_stop_token = plan.include_stop
        self._calls = None if plan.calls is None else CallParser(plan.calls)
        self._is_named = plan.calls is not None and plan.calls.is_named
        self._num_tokens = 0

    def event(self, output: TokenOutput, index: int, is_first: bool) -> ChoiceEvent:
        token_ids = output.token_ids
        detokenizer = self._detokenizer
        hides_last = output.stop_token_id is not None and not self._shows_stop_token
        text = detokenizer.push(token_ids[:-1] if hides_last else token_ids)
        finish_reason = output.finish_reason
        if finish_reason is not None:
            text += detokenizer.flush()
        if detokenizer.stopped is not None:
            # A run of byte tokens is read at its end: the match may lie in tokens that were delivered
            # already.
            token_ids = token_ids[: max(0, detokenizer.consumed_tokens - self._num_tokens)]
            finish_reason = "stop"
        self._num_tokens += len(token_ids)
        logprobs = output.logprobs[: len(token_ids)]
        parts, finish = self._parts(text, finish_reason)
        return ChoiceEvent(
            index,
            parts,
            token_ids,
            logprobs,
            output.prompt_logprobs,
            is_first,
            finish,
            stop_text=detokenizer.stopped,
            mean_hidden=output.mean_hidden,
        )

    def _parts(
        self, text: str, finish_reason: FinishReason | None
    ) -> tuple[Sequence[Part], ChoiceFinish | None]:
        calls = self._calls
        if calls is None:
            return ((text,) if text else ()), finish_reason
        parts = calls.push(text)
        if calls.is_done:
            finish_reason = "stop"
        if finish_reason is not None:
            parts += calls.flush()
        # A client that named the function is told of a plain end, as OpenAI's API does.
        if finish_reason == "stop" and calls.num_calls and not self._is_named:
            return parts, "tool_calls"
        return parts, finish_reason


class GenerationRun:
    """A plan at work. ``start`` it, take events until None, and ``close`` it in every case.

    ``deadline`` is when the whole answer must be there, ``queue_deadline`` until when a sequence may be
    started, both monotonic. The ticket was admitted and is closed by the run.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        plan: GenerationPlan,
        record: RequestRecord,
        ticket: Ticket,
        *,
        deadline: float | None = None,
        queue_deadline: float | None = None,
    ) -> None:
        self.usage = Usage(prompt_tokens=plan.num_prompt_tokens, phases=record.phases)
        self._engine = engine
        self._tokenizer = tokenizer
        self.plan = plan
        self._record = record
        self._ticket = ticket
        self._deadline = deadline
        self._queue_deadline = queue_deadline
        self._events: asyncio.Queue[ChoiceEvent | Exception] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._open_choices = plan.num_choices
        self._outcome: ChoiceFinish = "stop"

    def start(self, receive: Receive) -> None:
        """Send every choice to the engine, and watch ``receive`` for the client's departure."""
        self._tasks.append(asyncio.create_task(self._watch(receive)))
        n = self.plan.n
        for prompt_index, prompt in enumerate(self.plan.prompts):
            if prompt.sampling.greedy:  # all choices are the same: computed once, delivered n times
                self._tasks.append(asyncio.create_task(self._run_choice(prompt_index, 0, n)))
                continue
            for choice in range(n):
                self._tasks.append(asyncio.create_task(self._run_choice(prompt_index, choice, 1)))

    async def next_event(self, timeout_seconds: float | None = None) -> ChoiceEvent | None:
        """The next event; None when every choice has finished. Raises TimeoutError when nothing happened for
        so long, ApiError when a choice failed, ClientDisconnectedError when the client left; the latter two
        end the run."""
        if self._open_choices == 0:
            self._record.finish(self._outcome)
            return None
        event = await self._take_event(timeout_seconds)
        if isinstance(event, Exception):
            self._stop_tasks()
            raise self._failure(event) from event
        self.usage.completion_tokens += len(event.token_ids)
        self._record.count_generated(len(event.token_ids))
        if event.finish_reason is not None:
            self._open_choices -= 1
            self.usage.is_over = self._open_choices == 0
            self._record.finish_reasons[event.index] = event.finish_reason
            if event.finish_reason == "length" or self._outcome == "stop":
                self._outcome = event.finish_reason
        return event

    async def _take_event(self, timeout_seconds: float | None) -> ChoiceEvent | Exception:
        """The next event when it comes, RequestExpiredError when the deadline is earlier. Raises
        TimeoutError."""
        remaining = None if self._deadline is None else self._deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            return RequestExpiredError("the deadline of the request has passed")
        if not self._events.empty():
            return self._events.get_nowait()
        is_last = remaining is not None and (timeout_seconds is None or remaining <= timeout_seconds)
        try:
            async with asyncio.timeout(remaining if is_last else timeout_seconds):
                return await self._events.get()
        except TimeoutError:
            if is_last:
                return RequestExpiredError("the deadline of the request has passed")
            raise

    def fail(self) -> None:
        """Its answer could not be written, which is a fault of the server unless the run has ended before."""
        self._record.finish("error")

    async def close(self) -> None:
        """Abort whatever still runs. Idempotent."""
        self._stop_tasks()
        self._ticket.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._record.finish("client_disconnect")  # unless it ended before: nobody took the rest of the events

    def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _failure(self, error: Exception) -> Exception:
        """The error as the client sees it; notes the outcome."""
        match error:
            case ClientDisconnectedError():
                self._record.finish("client_disconnect")
                return error
            case EngineDrainingError():
                self._record.finish("shutdown")
                return shutting_down()
            case RequestExpiredError():
                self._record.finish("timeout")
                return request_timeout()
        self._record.finish("error")
        if isinstance(error, (ApiError, RequestFailedError)):
            return error if isinstance(error, ApiError) else internal_error(f"The request failed: {error}")
        if not isinstance(error, EngineError):
            logger.error("a choice of %s failed", self.plan.response_id, exc_info=error)
        return internal_error()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(ClientDisconnectedError())
        self._stop_tasks()

    async def _run_choice(self, prompt_index: int, choice: int, num_copies: int) -> None:
        index = prompt_index * self.plan.n + choice
        try:
            await self._generate(prompt_index, choice, index, num_copies)
        except Exception as error:  # delivered to whoever takes the events
            self._events.put_nowait(error)
        finally:
            self._ticket.sequence_ended()

    async def _generate(self, prompt_index: int, choice: int, index: int, num_copies: int) -> None:
        plan, prompt = self.plan, self.plan.prompts[prompt_index]
        spec = EngineRequest(
            request_id=f"{plan.response_id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=replace(prompt.sampling, choice=choice),
            cache_salt=plan.cache_salt,
            grammar=plan.grammar,
            pooling=plan.pooling,
            priority=plan.priority,
            queue_deadline=self._queue_deadline,
        )
        text = _ChoiceText(self._tokenizer, plan, prompt.sampling)
        record = ChoiceRecord(self._record)
        is_first = True
        async with aclosing(self._engine.generate(spec)) as outputs:
            async for output in outputs:
                record.observe(output, len(prompt.token_ids), is_first)
                if is_first and choice == 0:
                    self._ticket.prompt_computed(len(prompt.token_ids))
                    self.usage.cached_tokens += output.num_cached_tokens
                began = time.monotonic()
                event = text.event(output, index, is_first)
                self._record.metrics.detokenize_seconds.inc(time.monotonic() - began)
                is_first = False
                for copy in range(num_copies):
                    self._events.put_nowait(event if copy == 0 else replace(event, index=index + copy))
                if event.finish_reason is not None:
                    record.finished(event.finish_reason, num_copies)
                    return
        raise EngineError("the engine ended a request without a reason")
