"""Whether requests are traced. OpenTelemetry is imported only when it is switched on: by ``--otlp-endpoint``,
or by the variables that OpenTelemetry defines."""

import importlib.util
import logging
import os
from collections.abc import Mapping

from model.interface.errors import ConfigError
from server.observability.tracing import RequestTracer
from server.settings.settings import Settings

logger = logging.getLogger("gemserve.tracing")
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"


def load_tracer(settings: Settings, environ: Mapping[str, str] = os.environ) -> RequestTracer | None:
    """None when tracing is off. What the variables ask for in vain is a warning, since they are often set for
    every program of a cluster; a flag in vain is a ConfigError."""
    variable = next((name for name in ENDPOINT_VARIABLES if environ.get(name)), None)
    if settings.otlp_endpoint is None and (variable is None or _is_disabled(environ)):
        return None
    obstacle = _obstacle(environ)
    if obstacle is not None and settings.otlp_endpoint is not None:
        raise ConfigError(f"--otlp-endpoint: {obstacle}")
    if obstacle is not None:
        logger.warning("%s is set, but nothing is traced: %s", variable, obstacle)
        return None
    from server.observability.otel import otlp_tracer

    return otlp_tracer(settings.otlp_endpoint)


def _is_disabled(environ: Mapping[str, str]) -> bool:
    """An empty variable is one that is not set, here and below."""
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    return environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter != "otlp"


def _obstacle(environ: Mapping[str, str]) -> str | None:
    # that of traces comes first
    name = next((name for name in PROTOCOL_VARIABLES if environ.get(name)), None)
    if name is not None and environ[name] != PROTOCOL:
        return (
            f"{name}={environ[name]} is not supported; use {PROTOCOL} and the collector's port for "
            "it, 4318 by default"
        )
    for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return "OpenTelemetry is not installed; pip install 'gemserve[otel]'"
    return None
