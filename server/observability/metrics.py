"""Every metric of the server: names, labels and buckets in one place, in a registry of its own per
application.

Label values come from fixed sets, and their series exist from the start, so that the number of series never
depends on what clients send. Numbers of the engine are read from its plain statistics when scraped
(``server.observability.engine_metrics``).
"""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import anyio
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from server.build import commit
from server.engine.stats import StepStats
from server.errors import REJECTIONS, Rejection
from server.settings.metric_buckets import GRAMMAR_COMPILATION, POWERS_OF_TWO, token_buckets
from server.settings.settings import Settings
from server.version import __version__

# generate_latest writes this format; the library's own default content type announces one that mangles names
# with a colon.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

ENDPOINTS: Final = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat_completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/embeddings": "embeddings",
    "/v1/decisions": "decisions",
}
ROUTES: Final = (
    *ENDPOINTS,
    "/v1/messages/count_tokens",
    "/v1/models",
    "/v1/models/{id}",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/version",
    "/openapi.json",
    "/docs",
    "/tokenizer_info",
    "/tokenize",
    "/detokenize",
    "other",
)
METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
OUTCOMES: Final = ("stop", "length", "tool_calls", "client_disconnect", "timeout", "shutdown", "error")
FINISH_REASONS: Final = ("stop", "length", "tool_calls")
STEP_KINDS: Final = ("prefill", "decode", "mixed")
HOST_STAGES: Final = ("schedule", "sample", "detokenize")
GRAMMAR_KINDS: Final = ("json", "regex", "choice", "grammar", "calls")


def route_template(path: str) -> str:
    """The route label of a path: the template of a known route, else "other"."""
    if path in ROUTES:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


class Metrics:
    """Owner of the registry; the attributes are the metrics that the server itself writes."""

    def __init__(self, settings: Settings) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # else every counter has a second series with its time of creation
        self.registry = registry = CollectorRegistry()
        self.render_limiter = anyio.CapacityLimiter(1)
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"gemserve_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"gemserve_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(f"gemserve_{name}", text, labels, buckets=buckets, registry=registry)

        token_gaps, phases = settings.inter_token_latency_buckets, settings.request_phase_buckets
        durations, sizes = settings.request_duration_buckets, token_buckets()

        self.http_requests = counter(
            "http_requests_total", "HTTP requests answered.", "method", "route", "status"
        )
        self.http_duration = histogram(
            "http_request_duration_seconds", "Time to the end of the answer.", durations, "route"
        )
        self.http_in_flight = gauge("http_requests_in_flight", "HTTP requests being answered.", "route")
        self.streams_active = gauge("streams_active", "Event streams being sent.")

        self.requests = counter(
            "requests_total", "Generation requests by how they ended.", "endpoint", "stream", "outcome"
        )
        self.rejections = counter(
            "request_rejections_total", "Generation requests refused.", "endpoint", "reason"
        )
        self.choices = counter("choices_total", "Choices finished.", "finish_reason")
        self.prompt_tokens = counter(
            "prompt_tokens_total", "Prompt tokens of all sequences that started to generate."
        )
        self.prompt_tokens_cached = counter(
            "prompt_tokens_cached_total", "Prompt tokens served from the prefix cache."
        )
        self.generation_tokens = counter("generation_tokens_total", "Tokens generated, as counted in usage.")
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", sizes)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens generated for a request.", sizes
        )
        self.request_max_tokens = histogram("request_max_tokens", "Effective max_tokens of a request.", sizes)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds",
            "Arrival to first token.",
            settings.time_to_first_token_buckets,
            "stream",
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Time between tokens of a choice.", token_gaps
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token of a choice after its first.",
            token_gaps,
        )
        self.request_duration = histogram(
            "request_duration_seconds", "Arrival to the end of the request.", durations, "endpoint", "stream"
        )
        self.queue_seconds = histogram(
            "request_queue_seconds", "Arrival in the engine to first step.", phases
        )
        self.prefill_seconds = histogram("request_prefill_seconds", "First step to first token.", phases)
        self.decode_seconds = histogram("request_decode_seconds", "First token to last token.", phases)
        self.inference_seconds = histogram("request_inference_seconds", "First step to last token.", phases)

        self.step_duration = histogram(
            "engine_step_duration_seconds", "Duration of a step.", token_gaps, "kind"
        )
        self.step_tokens = histogram("engine_step_tokens", "Tokens computed in a step.", POWERS_OF_TWO)
        self.step_sequences = histogram("engine_step_sequences", "Sequences in a step.", POWERS_OF_TWO)
        self.host_seconds = counter(
            "engine_host_seconds_total",
            "Time outside the network: scheduling and its books, logits to tokens (and on a GPU the wait "
            "for them), text.",
            "stage",
        )
        self.detokenize_seconds = self.host_seconds.labels("detokenize")
        self.grammar_seconds = histogram(
            "structured_output_compile_seconds",
            "Time to a compiled constraint, or to its refusal.",
            GRAMMAR_COMPILATION,
        )
        self.grammars = counter("structured_output_requests_total", "Requests with a constraint.", "kind")

        build = gauge("build_info", "Always 1.", "version", "commit", "python", "torch")
        gauge("tensor_parallel_size", "Devices that share one model.").set(settings.tensor_parallel_size)
        build.labels(__version__, commit(), platform.python_version(), package_version("torch")).set(1)
        self._create_series()

    def _create_series(self) -> None:
        """Rates start at zero only if the series is there before its first event."""
        for route in ROUTES:
            self.http_duration.labels(route)
            self.http_in_flight.labels(route)
        for route, endpoint in ENDPOINTS.items():
            self.http_requests.labels("POST", route, "200")
            for reason in REJECTIONS:
                self.rejections.labels(endpoint, reason)
            for stream in ("true", "false"):
                self.request_duration.labels(endpoint, stream)
                self.time_to_first_token.labels(stream)
                for outcome in OUTCOMES:
                    self.requests.labels(endpoint, stream, outcome)
        for finish_reason in FINISH_REASONS:
            self.choices.labels(finish_reason)
        for kind in STEP_KINDS:
            self.step_duration.labels(kind)
        for stage in HOST_STAGES:
            self.host_seconds.labels(stage)
        for kind in GRAMMAR_KINDS:
            self.grammars.labels(kind)

    def render(self) -> bytes:
        """In any thread."""
        return generate_latest(self.registry)

    def observe_http(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "other"
        self.http_requests.labels(method, route, str(status)).inc()
        self.http_duration.labels(route).observe(seconds)

    def observe_rejection(self, endpoint: str, reason: Rejection) -> None:
        self.rejections.labels(endpoint, reason).inc()

    def observe_step(self, step: StepStats) -> None:
        """Called in the engine's thread."""
        self.step_duration.labels(step.kind).observe(step.duration)
        self.step_tokens.observe(step.num_tokens)
        self.step_sequences.observe(step.num_sequences)
        self.host_seconds.labels("schedule").inc(step.schedule_seconds)
        self.host_seconds.labels("sample").inc(step.sample_seconds)
