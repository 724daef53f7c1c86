"""Spans of requests, exported by OTLP over HTTP, for programs that serve them.

Tracing is on where `OTEL_EXPORTER_OTLP_ENDPOINT` (or `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) is set; the other variables
of OpenTelemetry (sampler, headers, resource attributes, service name) work as its SDK has them. It needs the extra
`tracing`. Without the variable nothing is imported, and a request's `traceparent` (W3C Trace Context) passes unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

TRACE_HEADER = b"traceparent"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

MAX_TRACEPARENT_BYTES = 256

Attribute = str | int | float | bool


def trace_of(value: bytes) -> str:
    """The `traceparent` of a request's header; empty where it is too long to be one."""
    return value.decode("latin-1") if len(value) <= MAX_TRACEPARENT_BYTES else ""


class Span(Protocol):
    """A span that has begun."""

    @property
    def traceparent(self) -> str:
        """What those that work for it get as their parent; empty without one."""
        ...

    def end(self, at_s: float, **attributes: Attribute) -> None:
        """End it at a time of the tracer's clock."""
        ...


class Tracer(Protocol):
    """Makes spans. Times are those of a monotonic clock."""

    @property
    def on(self) -> bool:
        """Whether spans are exported."""
        ...

    def begin(self, name: str, traceparent: str, at_s: float) -> Span:
        """Begin a span below the one that `traceparent` names; of a new trace where it names none."""
        ...

    def record(self, name: str, traceparent: str, begin_s: float, end_s: float, **attributes: Attribute) -> None:
        """Export a span whose times are known."""
        ...

    def close(self) -> None:
        """Export what has ended."""
        ...


class PassedOn:
    """Stands for a span where none is made: the parent's name goes on."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def end(self, at_s: float, **attributes: Attribute) -> None:
        """Do nothing."""


class NoTracer:
    """Makes no spans."""

    on = False

    def begin(self, name: str, traceparent: str, at_s: float) -> Span:  # noqa: ARG002
        """Return what passes the parent's name on."""
        return PassedOn(traceparent)

    def record(self, name: str, traceparent: str, begin_s: float, end_s: float, **attributes: Attribute) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TracingMissing(ValueError):
    """Tracing is asked for, and its libraries are not installed."""


def tracer_of(service: str, environment: Mapping[str, str], *, clock: Callable[[], float] = time.monotonic) -> Tracer:
    """Return a program's tracer.

    Args:
        service: name of the program, unless `OTEL_SERVICE_NAME` has another one.
        environment: variables of the process.
        clock: the one of the times that spans get.

    Raises:
        TracingMissing: an endpoint is set, and the extra `tracing` is not installed.
    """
    endpoint = next((name for name in ENDPOINTS if environment.get(name)), None)
    if endpoint is None:
        return NoTracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingMissing(
            f"{endpoint} is set, but spans cannot be exported: pip install 'stoker[tracing]' ({error})"
        ) from error
    names: dict[str, str] = {"service.name": environment.get("OTEL_SERVICE_NAME") or service}
    if pod_uid := environment.get("STOKER_POD_UID"):
        names["service.instance.id"] = pod_uid
    provider = TracerProvider(resource=Resource.create({**names}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return OtlpTracer(provider, time.time() - clock())


class OtlpTracer:
    """Exports spans by OpenTelemetry's SDK."""

    on = True

    def __init__(self, provider: Any, epoch_s: float) -> None:
        """`epoch_s`: what makes Unix time of the clock's times."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._epoch_s = provider, epoch_s
        self._tracer = provider.get_tracer("stoker")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, traceparent: str, at_s: float) -> Span:
        """Begin a span."""
        parent = self._propagator.extract({"traceparent": traceparent})
        return _OtlpSpan(self._tracer.start_span(name, context=parent, start_time=self.unix_ns(at_s)), self)

    def record(self, name: str, traceparent: str, begin_s: float, end_s: float, **attributes: Attribute) -> None:
        """Export a span whose times are known."""
        self.begin(name, traceparent, begin_s).end(end_s, **attributes)

    def close(self) -> None:
        """Export what has ended."""
        self._provider.shutdown()

    def unix_ns(self, at_s: float) -> int:
        """Nanoseconds of Unix time."""
        return int((at_s + self._epoch_s) * 1e9)


class _OtlpSpan:
    def __init__(self, span: Any, tracer: OtlpTracer) -> None:
        self._span, self._tracer = span, tracer
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def end(self, at_s: float, **attributes: Attribute) -> None:
        self._span.set_attributes({name.replace("__", "."): value for name, value in attributes.items()})
        self._span.end(end_time=self._tracer.unix_ns(at_s))
