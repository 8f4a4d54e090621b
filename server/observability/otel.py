"""Traces of finished requests, as OpenTelemetry spans: the request, and in it its queue, prefill and decode.
Spans are made when a request has ended, with the times that were measured anyway, and sent by a thread of the
SDK. Imported only if tracing is on.

The SDK reads its own variables: sampler, resource attributes, headers, limits and batching.
"""

import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.observability.tracing import RequestTrace, RequestTracer
from server.version import __version__

TRACES_PATH = "/v1/traces"


class OtelTracer(RequestTracer):
    """A tracer provider of its own: nothing global is set."""

    def __init__(self, processor: SpanProcessor) -> None:
        defaults = Resource.create({"service.name": "gemserve", "service.version": __version__})
        resource = defaults.merge(OTELResourceDetector().detect())  # what the variables say comes first
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("gemserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, trace: RequestTrace) -> str:
        offset = time.time_ns() - time.monotonic_ns()

        def unix(seconds: float) -> int:
            return offset + round(seconds * 1e9)

        span = self._tracer.start_span(
            trace.name,
            context=self._propagator.extract(trace.carrier),
            kind=SpanKind.SERVER,
            attributes=trace.attributes,
            start_time=unix(trace.began),
        )
        context = set_span_in_context(span)
        for phase in trace.phases:
            child = self._tracer.start_span(phase.name, context=context, start_time=unix(phase.began))
            child.end(unix(phase.ended))
        if trace.error_type is not None:
            span.set_attribute("error.type", trace.error_type)
            span.set_status(Status(StatusCode.ERROR))
        span.end(unix(trace.ended))
        return format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        self._provider.shutdown()


def otlp_tracer(endpoint: str | None) -> OtelTracer:
    """``endpoint``: address of the collector, with or without the path; None: what the variables say."""
    if endpoint is None:
        exporter = OTLPSpanExporter()
    else:
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH)
    return OtelTracer(BatchSpanProcessor(exporter))
