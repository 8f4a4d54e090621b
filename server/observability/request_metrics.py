"""The record of one generation request: when things happened and how it ended, written to the metrics, to one
log line and, where tracing is on, to a trace.

Counted here, so that every number a client sees in ``usage`` is the number in the metrics.
"""

import logging
import math
import time
from collections.abc import Mapping

from typing_extensions import TypedDict

from server.engine.request import RequestTimings, TokenOutput
from server.errors import Rejection
from server.observability.logs import with_fields
from server.observability.metrics import Metrics
from server.observability.tracing import Attribute, Phase, RequestTrace, RequestTracer

logger = logging.getLogger("gemserve.request")

# What OpenTelemetry's conventions call the endpoints' work.
OPERATIONS = {
    "completions": "text_completion",
    "chat_completions": "chat",
    "responses": "chat",
    "messages": "chat",
}


class ChoiceRecord:
    """One sequence in the engine."""

    def __init__(self, request: "RequestRecord") -> None:
        self._request = request
        self._metrics = request.metrics
        self._first_scheduled = 0.0
        self._first: float | None = None
        self._last = 0.0
        self._num_tokens = 0

    def observe(self, output: TokenOutput, num_prompt_tokens: int, is_first: bool) -> None:
        """Count one output of the engine as it arrives."""
        now = time.monotonic()
        num_computed = num_prompt_tokens - output.num_cached_tokens if is_first else 0
        self._request.phases.observe(output.timings, now, num_computed, len(output.token_ids) - is_first)
        if is_first:
            self._metrics.prompt_tokens.inc(num_prompt_tokens)
            self._metrics.prompt_tokens_cached.inc(output.num_cached_tokens)
            self._observe_start(output.timings)
        if output.token_ids:
            if self._first is None:
                self._first = now
                self._request.observe_first_token(now)
            else:
                self._metrics.inter_token_latency.observe(now - self._last)
            self._last = now
            self._num_tokens += len(output.token_ids)

    def _observe_start(self, timings: RequestTimings) -> None:
        assert timings.first_scheduled is not None
        assert timings.first_token is not None
        self._first_scheduled = timings.first_scheduled
        self._metrics.queue_seconds.observe(timings.first_scheduled - timings.arrival)
        self._metrics.prefill_seconds.observe(timings.first_token - timings.first_scheduled)

    def finished(self, finish_reason: str, num_choices: int) -> None:
        """A choice ended, by a stop string perhaps, which the engine knows nothing of."""
        self._metrics.choices.labels(finish_reason).inc(num_choices)
        if self._first is not None:
            seconds = self._last - self._first
            self._metrics.decode_seconds.observe(seconds)
            self._metrics.inference_seconds.observe(self._last - self._first_scheduled)
            if self._num_tokens > 1:
                self._metrics.time_per_output_token.observe(seconds / (self._num_tokens - 1))


class Timings(TypedDict):
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None


class PhaseTimes:
    """The phases of a whole request: until the first of its choices ran, until the first token, until the
    last output. They follow each other, so that their sum is the request's time in the engine, however many
    choices it has."""

    def __init__(self) -> None:
        self._arrival = self._first_scheduled = self._first_token = math.inf
        self._last = -math.inf
        self._num_prefilled = self._num_decoded = 0

    def observe(self, timings: RequestTimings, now: float, num_prefilled: int, num_decoded: int) -> None:
        """``num_prefilled`` tokens were computed before a sequence's first token, ``num_decoded`` drawn after
        it."""
        assert timings.first_scheduled is not None
        assert timings.first_token is not None
        self._arrival = min(self._arrival, timings.arrival)
        self._first_scheduled = min(self._first_scheduled, timings.first_scheduled)
        self._first_token = min(self._first_token, timings.first_token)
        self._last = max(self._last, now)
        self._num_prefilled += num_prefilled
        self._num_decoded += max(0, num_decoded)

    def phases(self) -> list[Phase]:
        """Queue, prefill, decode; none before the first output."""
        if self._last < 0:
            return []
        times = (self._arrival, self._first_scheduled, self._first_token, self._last)
        return [Phase(name, times[i], times[i + 1]) for i, name in enumerate(("queue", "prefill", "decode"))]

    def server_timing(self) -> str:
        """The value of a Server-Timing header, in milliseconds."""
        return ", ".join(
            f"{phase.name};dur={1000 * (phase.ended - phase.began):.3f}" for phase in self.phases()
        )

    def wire(self) -> Timings:
        """The object ``timings`` of an answer that has begun. A rate is null where nothing was computed."""
        queue, prefill, decode = (phase.ended - phase.began for phase in self.phases())

        def rate(num_tokens: int, seconds: float) -> float | None:
            return round(num_tokens / seconds, 3) if num_tokens and seconds > 0 else None

        return {
            "queue_ms": round(1000 * queue, 3),
            "prefill_ms": round(1000 * prefill, 3),
            "decode_ms": round(1000 * decode, 3),
            "prefill_tokens_per_second": rate(self._num_prefilled, prefill),
            "decode_tokens_per_second": rate(self._num_decoded, decode),
        }


class RequestRecord:
    """``response_id`` stands in the body, ``request_id`` in the header; they differ where the client chose
    the latter. ``response_id`` is None where a request was refused before it got one. ``carrier``: the
    headers that tell which trace the request belongs to."""

    def __init__(
        self,
        metrics: Metrics,
        endpoint: str,
        response_id: str | None,
        request_id: str,
        tracer: RequestTracer | None = None,
        carrier: Mapping[str, str] | None = None,
    ) -> None:
        self.metrics = metrics
        self.stream = False
        self._endpoint = endpoint
        self._response_id = response_id
        self._request_id = request_id
        self._tracer = tracer
        self._carrier = carrier or {}
        self._arrival = time.monotonic()
        self._first_token: float | None = None
        self.phases = PhaseTimes()
        self._outcome: str | None = None
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.finish_reasons: dict[int, str] = {}  # by the index of the choice
        self._attributes: dict[str, Attribute] = {}

    @property
    def _stream_label(self) -> str:
        return "true" if self.stream else "false"

    @property
    def is_finished(self) -> bool:
        return self._outcome is not None

    @property
    def is_traced(self) -> bool:
        return self._tracer is not None

    def add_attributes(self, attributes: Mapping[str, Attribute]) -> None:
        """What the trace is to say of the request."""
        self._attributes.update(attributes)

    def timing_headers(self) -> dict[str, str]:
        """Of an answer in one piece, once it is complete."""
        milliseconds = round(1000 * (time.monotonic() - self._arrival))
        return {"server-timing": self.phases.server_timing(), "openai-processing-ms": str(milliseconds)}

    def observe_plan(self, num_prompt_tokens: int, max_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.metrics.request_prompt_tokens.observe(num_prompt_tokens)
        self.metrics.request_max_tokens.observe(max_tokens)

    def observe_first_token(self, now: float) -> None:
        if self._first_token is None:
            self._first_token = now
            self.metrics.time_to_first_token.labels(self._stream_label).observe(now - self._arrival)

    def count_generated(self, num_tokens: int) -> None:
        self.num_generated_tokens += num_tokens
        self.metrics.generation_tokens.inc(num_tokens)

    def reject(self, reason: Rejection) -> None:
        """The request was refused: it counts as that alone."""
        self.metrics.observe_rejection(self._endpoint, reason)
        self._trace(time.monotonic(), error_type=reason)

    def finish(self, outcome: str) -> None:
        """Note how the request ended; only the first call counts."""
        if self._outcome is not None:
            return
        self._outcome = outcome
        now = time.monotonic()
        seconds = now - self._arrival
        self.metrics.requests.labels(self._endpoint, self._stream_label, outcome).inc()
        self.metrics.request_duration.labels(self._endpoint, self._stream_label).observe(seconds)
        if self._first_token is not None:
            self.metrics.request_generation_tokens.observe(self.num_generated_tokens)
        has_failed = outcome in ("client_disconnect", "timeout", "shutdown", "error")
        trace_id = self._trace(now, error_type=outcome if has_failed else None)
        ttft = None if self._first_token is None else round(self._first_token - self._arrival, 3)
        logger.info(
            "%s request_id=%s %s %s prompt_tokens=%d generated_tokens=%d ttft=%s seconds=%.3f",
            self._response_id,
            self._request_id,
            self._endpoint,
            outcome,
            self.num_prompt_tokens,
            self.num_generated_tokens,
            "-" if ttft is None else f"{ttft:.3f}",
            seconds,
            extra=with_fields(
                response_id=self._response_id,
                request_id=self._request_id,
                trace_id=trace_id,
                endpoint=self._endpoint,
                stream=self.stream,
                outcome=outcome,
                prompt_tokens=self.num_prompt_tokens,
                generated_tokens=self.num_generated_tokens,
                ttft_seconds=ttft,
                seconds=round(seconds, 3),
            ),
        )

    def _trace(self, now: float, error_type: str | None) -> str | None:
        """The id of the trace, None while tracing is off."""
        if self._tracer is None:
            return None
        operation = OPERATIONS.get(self._endpoint, self._endpoint)
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "gemserve",
            "gemserve.request_id": self._request_id,
            "gen_ai.usage.input_tokens": self.num_prompt_tokens,
            "gen_ai.usage.output_tokens": self.num_generated_tokens,
            **self._attributes,
        }
        if self._response_id is not None:
            attributes["gen_ai.response.id"] = self._response_id
        if self.finish_reasons:
            attributes["gen_ai.response.finish_reasons"] = [
                reason for _, reason in sorted(self.finish_reasons.items())
            ]
        name = f"{operation} {attributes.get('gen_ai.request.model', '')}".rstrip()
        phases = self.phases.phases()
        return self._tracer.record(
            RequestTrace(name, self._arrival, now, phases, attributes, self._carrier, error_type)
        )
