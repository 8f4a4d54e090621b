"""Traces: a span for each request with its queue, prefill and decode in it, in the trace that its client
began."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from model.interface.errors import ConfigError
from server.observability.load_tracer import load_tracer
from server.observability.otel import OtelTracer
from server.settings.settings import Settings
from tests.fakes import BOS, POISON
from tests.http.live_server import LiveServer, live_server

ROOT = Path(__file__).parent.parent.parent
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


class Traced:
    def __init__(self, server: LiveServer, exporter: InMemorySpanExporter) -> None:
        self.server = server
        self._exporter = exporter

    def spans(self, count: int) -> list[ReadableSpan]:
        """The next spans that ended, children before their parent."""
        self.server.wait_for(lambda: len(self._exporter.get_finished_spans()) >= count, seconds=60)
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        assert len(spans) == count, [span.name for span in spans]
        return spans


@pytest.fixture(scope="module")
def module_server() -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    with live_server(tracer=OtelTracer(SimpleSpanProcessor(exporter))) as server:
        yield Traced(server, exporter)


@pytest.fixture
def traced(module_server: Traced) -> Traced:
    module_server._exporter.clear()
    return module_server


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[Traced]:
    exporter = InMemorySpanExporter()
    with live_server(tracer=OtelTracer(SimpleSpanProcessor(exporter)), api_key=("key",)) as server:
        yield Traced(server, exporter)


@pytest.mark.parametrize(
    "headers", [{}, {"x-api-key": "kez"}, {"x-api-key": "key", "host": "evil.example"}], ids=str
)
@pytest.mark.parametrize(("path", "name"), [("/v1/completions", "text_completion"), ("/v1/messages", "chat")])
def test_a_request_that_is_refused_by_its_key_or_host_is_a_span(
    guarded_server: Traced, path: str, name: str, headers: dict[str, str]
) -> None:
    response = guarded_server.server.post(
        path, {"prompt": "secret words"}, headers={**TRACEPARENT, **headers}
    )
    assert response.status_code == (403 if "host" in headers else 401)
    (span,) = guarded_server.spans(1)
    assert span.name == name
    assert span.status.status_code is StatusCode.ERROR
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    found = attributes(span)
    assert found["error.type"] == "unauthorized"
    assert found["gemserve.request_id"] == response.headers["x-request-id"]
    assert "gen_ai.response.id" not in found
    assert not [value for value in found.values() if "kez" in str(value)]


def test_only_what_asks_for_an_answer_of_the_model_is_a_span(guarded_server: Traced) -> None:
    for path in ("/v1/models", "/metrics", "/nowhere"):
        assert guarded_server.server.client.get(path).status_code == 401
    guarded_server.server.post("/v1/completions", {"prompt": "a"})
    assert len(guarded_server.spans(1)) == 1


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_a_chat_is_a_span_with_its_phases(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "gemserve.request")
    body = {
        "messages": [{"role": "user", "content": "secret words"}],
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "seed": 3,
        "stop": ["~~"],
        "n": 2,
        "user": "someone",
    }
    answer = traced.server.client.post("/v1/chat/completions", json=body, headers=TRACEPARENT).json()
    *phases, request = traced.spans(4)
    assert request.name == "chat fake-gemma"
    assert request.kind is SpanKind.SERVER
    assert request.status.status_code is StatusCode.UNSET
    assert request.parent is not None
    assert (f"{request.parent.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert f"{request.context.trace_id:032x}" == TRACE
    assert request.context.trace_state.get("vendor") == "1"
    found = attributes(request)
    assert found.pop("server.port") == traced.server.port
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "gemserve",
        "gen_ai.request.model": "fake-gemma",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stop_sequences": ("~~",),
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": "fake-gemma",
        "gen_ai.response.finish_reasons": tuple(choice["finish_reason"] for choice in answer["choices"]),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
        "gemserve.request_id": answer["id"],
        "server.address": "127.0.0.1",
    }
    assert "secret" not in request.to_json()
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    times: list[int] = [request.start_time or 0]
    for span in phases:
        assert span.parent == request.context
        assert span.kind is SpanKind.INTERNAL
        times += [span.start_time or 0, span.end_time or 0]
    assert times == sorted(times)
    assert times[2:-1:2] == times[3::2], "the phases follow each other"
    assert times[-1] <= (request.end_time or 0)
    assert caplog.records[-1].gemserve_fields["trace_id"] == TRACE  # type: ignore[attr-defined]


def test_a_completion_without_a_traceparent_begins_a_trace(traced: Traced) -> None:
    traced.server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True})
    *_, request = traced.spans(4)
    assert request.name == "text_completion fake-gemma"
    assert request.parent is None
    assert "gen_ai.request.seed" not in attributes(request), (
        "the server's own seed is no parameter of the request"
    )


def test_what_is_not_sampled_upstream_is_not_sent(traced: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    traced.server.client.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers
    ).raise_for_status()
    traced.server.complete(prompt="a", max_tokens=2)
    assert [f"{span.context.trace_id:032x}" == TRACE for span in traced.spans(4)] == [False] * 4


@pytest.mark.parametrize(
    "traceparent", ["", "x" * 1000, "00-0-0-0", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"]
)
def test_a_traceparent_that_is_none_is_ignored(traced: Traced, traceparent: str) -> None:
    headers = {"traceparent": traceparent, "tracestate": "=,=;" * 50}
    traced.server.client.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 2}, headers=headers
    ).raise_for_status()
    assert traced.spans(4)[-1].parent is None


def test_failures_and_refusals_name_their_reason(traced: Traced) -> None:
    traced.server.post("/v1/completions", {"prompt": [BOS, POISON], "max_tokens": 2})
    (failed,) = traced.spans(1)
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes(failed)["error.type"] == "error"
    traced.server.post("/v1/completions", {"prompt": "a", "model": "other"})
    (refused,) = traced.spans(1)
    assert refused.status.status_code is StatusCode.ERROR
    assert attributes(refused)["error.type"] == "model_not_found"
    assert "gen_ai.request.model" not in attributes(refused)


class Collector(BaseHTTPRequestHandler):
    received: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        self.received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_traces_reach_a_collector_before_the_server_ends(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "service.name=from-variables,deployment.environment.name=test"
    )
    received: list[tuple[str, bytes]] = []
    handler = type("Handler", (Collector,), {"received": received})
    with HTTPServer(("127.0.0.1", 0), handler) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        try:
            with live_server(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}{path}") as server:
                server.complete(prompt="a", max_tokens=2)
        finally:
            collector.shutdown()
    ((where, body),) = received
    assert where == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    found = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert found["service.name"] == "from-variables"
    assert found["deployment.environment.name"] == "test"
    assert [span.name for span in resource.scope_spans[0].spans] == [
        "queue",
        "prefill",
        "decode",
        "text_completion fake-gemma",
    ]


def test_a_collector_that_does_not_answer_does_not_keep_the_server_from_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.app.LAST_TRACES_SECONDS", 0.1)
    answers = threading.Event()

    class Stuck(OtelTracer):
        def close(self) -> None:
            answers.wait(60)

    with live_server(tracer=Stuck(SimpleSpanProcessor(InMemorySpanExporter()))) as server:
        server.complete(prompt="a", max_tokens=2)
    answers.set()
    assert "the last traces were not taken within 0.1 seconds" in caplog.text


def test_tracing_is_off_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    assert load_tracer(Settings(), {}) is None
    assert load_tracer(Settings(), asked | {"OTEL_SDK_DISABLED": "true"}) is None
    assert load_tracer(Settings(), asked | {"OTEL_TRACES_EXPORTER": "none"}) is None
    tracer = load_tracer(Settings(), asked)
    assert tracer is not None
    tracer.close()
    assert not caplog.records
    grpc = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert load_tracer(Settings(), asked | grpc) is None
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=grpc is not supported" in caplog.text
    with pytest.raises(ConfigError, match=r"--otlp-endpoint: .*grpc is not supported; use http/protobuf"):
        load_tracer(Settings(otlp_endpoint="http://127.0.0.1:4318"), grpc)


def test_variables_for_traces_come_first_and_empty_ones_are_none(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}
    own = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    for more in (
        {own: "http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
        {own: "", "OTEL_EXPORTER_OTLP_PROTOCOL": "", "OTEL_TRACES_EXPORTER": "", "OTEL_SDK_DISABLED": ""},
    ):
        tracer = load_tracer(Settings(), asked | more)
        assert tracer is not None, more
        tracer.close()
    assert not caplog.records
    assert (
        load_tracer(Settings(), asked | {own: "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}) is None
    )
    assert f"{own}=grpc is not supported" in caplog.text


def test_without_the_extra_a_flag_is_an_error_and_a_variable_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint: .*pip install 'gemserve\[otel\]'"):
        load_tracer(Settings(otlp_endpoint="http://127.0.0.1:4318"), {})
    assert (
        load_tracer(Settings(), {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"})
        is None
    )
    assert "pip install 'gemserve[otel]'" in caplog.text


PROGRAM = """
import json, sys
from server.app import create_app
from server.settings.settings import Settings
create_app(Settings(), engine_factory=lambda settings, report: None)
parts = ("opentelemetry.sdk", "opentelemetry.exporter")
print(json.dumps(sorted(name for name in sys.modules if name.startswith(parts))))
"""


def test_the_sdk_is_imported_only_when_tracing_is_on() -> None:
    def imported(**environ: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        result: list[str] = json.loads(done.stdout)
        return result

    assert imported() == []
    assert "opentelemetry.sdk.trace" in imported(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:4318")
