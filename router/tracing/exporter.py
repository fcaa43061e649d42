"""Sends the spans of finished requests to an OpenTelemetry collector. Router process; sending has a thread of its own.

Its queue is bounded by the SDK (`OTEL_BSP_MAX_QUEUE_SIZE`); spans that find it full are dropped, and the SDK says so.
"""

from __future__ import annotations

import importlib
from typing import Any
from urllib.parse import urlsplit

from common.base.errors import ConfigError
from router.requests.request import TraceContext
from router.tracing.spans import Span, spans_of

_NS = 1_000_000_000


class Traces:
    """Spans of requests, sent with OTLP over HTTP. The SDK reads the standard variables, such as OTEL_TRACES_SAMPLER."""

    def __init__(self, endpoint: str, exporter: Any = None) -> None:
        """`endpoint`: such as http://localhost:4318/v1/traces. Raises: ConfigError if it is not a URL, or without the extra."""
        if not _is_url(endpoint):
            raise ConfigError(
                f"--otlp-traces-endpoint {endpoint!r} is not a URL such as http://localhost:4318/v1/traces"
            )
        try:
            trace = importlib.import_module("opentelemetry.trace")
            sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
            export: Any = importlib.import_module("opentelemetry.sdk.trace.export")
            resources: Any = importlib.import_module("opentelemetry.sdk.resources")
            otlp: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            propagation: Any = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError as error:
            raise ConfigError("--otlp-traces-endpoint needs the extra: pip install 'kvrelay[traces]'") from error
        self._trace: Any = trace
        self._propagator: Any = propagation.TraceContextTextMapPropagator()
        resource = resources.Resource.create({"service.name": "kvrelay"})
        if "unknown_service" in str(resource.attributes.get("service.name", "")):
            resource = resource.merge(resources.Resource({"service.name": "kvrelay"}))
        self._provider: Any = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            export.BatchSpanProcessor(exporter or otlp.OTLPSpanExporter(endpoint=endpoint, timeout=5))
        )
        self._tracer: Any = self._provider.get_tracer("kvrelay")

    def record(self, story: dict[str, Any], context: TraceContext) -> None:
        """Queue the spans of a finished story (`Story.plain`). Does not wait."""
        arrived_ns = int(story["arrived_at"] * _NS)
        carrier = {"traceparent": context.parent, "tracestate": context.state}
        outer = self._propagator.extract({key: value for key, value in carrier.items() if value})
        made: dict[int, tuple[Any, Any]] = {}
        spans = spans_of(story)
        for span in spans:
            parent = outer if span.parent is None else made[id(span.parent)][1]
            kind = self._trace.SpanKind.SERVER if span.parent is None else self._trace.SpanKind.INTERNAL
            started = self._tracer.start_span(
                span.name, parent, kind, span.attributes, start_time=arrived_ns + int(span.start_s * _NS)
            )
            made[id(span)] = started, self._trace.set_span_in_context(started, outer)
        for span in reversed(spans):
            self._end(made[id(span)][0], span, arrived_ns)

    def _end(self, started: Any, span: Span, arrived_ns: int) -> None:
        for t_s, name, attributes in span.events:
            started.add_event(name, attributes, arrived_ns + int(t_s * _NS))
        if span.error:
            started.set_status(self._trace.Status(self._trace.StatusCode.ERROR, span.error))
        started.end(arrived_ns + int(max(span.start_s, span.end_s) * _NS))

    def close(self) -> None:
        """Send what is queued, for at most some seconds."""
        self._provider.shutdown()


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an unbalanced bracket, or an invalid port
        return False
