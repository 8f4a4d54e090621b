"""Every metric of the server: names, labels and buckets in one place, in a registry of its own per application.

Label values come from fixed sets, and their series exist from the start, so that the number of series never depends on what
clients send. Numbers of the engine are read from its plain statistics when scraped (``server.engine_metrics``).
"""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Final

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

from server.engine.stats import StepStats
from server.errors import REJECTIONS, Rejection
from server.version import __version__

# generate_latest writes this format; the library's own default content type announces one that mangles names with a colon.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

ENDPOINTS: Final = {"/v1/completions": "completions", "/v1/chat/completions": "chat_completions"}
ROUTES: Final = (
    *ENDPOINTS,
    "/v1/models",
    "/v1/models/{id}",
    "/health",
    "/health/live",
    "/health/ready",
    "/metrics",
    "/version",
    "/openapi.json",
    "/tokenizer_info",
    "/tokenize",
    "/detokenize",
    "other",
)
METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
OUTCOMES: Final = ("stop", "length", "client_disconnect", "timeout", "shutdown", "error")
FINISH_REASONS: Final = ("stop", "length")
STEP_KINDS: Final = ("prefill", "decode", "mixed")

_TTFT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_ITL = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_DURATION = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)
_PHASE = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_POWERS_OF_TWO = tuple(float(2**i) for i in range(15))
_MAX_TOKEN_BUCKET = 131072


def token_buckets(largest: int = _MAX_TOKEN_BUCKET) -> list[float]:
    """1, 2, 5, 10, 20, 50 … up to ``largest``."""
    steps = [float(digit * 10**power) for power in range(len(str(largest))) for digit in (1, 2, 5)]
    return [*(step for step in steps if step < largest), float(largest)]


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

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # else every counter has a second series with its time of creation
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"gemserve_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"gemserve_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] | list[float], *labels: str) -> Histogram:
            return Histogram(f"gemserve_{name}", text, labels, buckets=buckets, registry=registry)

        self.http_requests = counter("http_requests_total", "HTTP requests answered.", "method", "route", "status")
        self.http_duration = histogram("http_request_duration_seconds", "Time to the end of the answer.", _DURATION, "route")
        self.http_in_flight = gauge("http_requests_in_flight", "HTTP requests being answered.", "route")
        self.streams_active = gauge("streams_active", "Event streams being sent.")

        self.requests = counter("requests_total", "Generation requests by how they ended.", "endpoint", "stream", "outcome")
        self.rejections = counter("request_rejections_total", "Generation requests refused.", "endpoint", "reason")
        self.choices = counter("choices_total", "Choices finished.", "finish_reason")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of all sequences that started to generate.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached_total", "Prompt tokens served from the prefix cache.")
        self.generation_tokens = counter("generation_tokens_total", "Tokens generated, as counted in usage.")
        sizes = token_buckets()
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", sizes)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens generated for a request.", sizes)
        self.request_max_tokens = histogram("request_max_tokens", "Effective max_tokens of a request.", sizes)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT, "stream")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Time between tokens of a choice.", _ITL)
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Mean time per token of a choice after its first.", _ITL
        )
        self.request_duration = histogram("request_duration_seconds", "Arrival to last token.", _DURATION, "endpoint", "stream")
        self.queue_seconds = histogram("request_queue_seconds", "Arrival in the engine to first step.", _PHASE)
        self.prefill_seconds = histogram("request_prefill_seconds", "First step to first token.", _PHASE)
        self.decode_seconds = histogram("request_decode_seconds", "First token to last token.", _PHASE)

        self.step_duration = histogram("engine_step_duration_seconds", "Duration of a step.", _ITL, "kind")
        self.step_tokens = histogram("engine_step_tokens", "Tokens computed in a step.", _POWERS_OF_TWO)
        self.step_sequences = histogram("engine_step_sequences", "Sequences in a step.", _POWERS_OF_TWO)

        build = gauge("build_info", "Always 1.", "version", "python", "torch")
        build.labels(__version__, platform.python_version(), package_version("torch")).set(1)
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

    def render(self) -> bytes:
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
