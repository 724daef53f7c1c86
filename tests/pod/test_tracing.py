"""Tracing is off without an endpoint, and says what is missing where its libraries are."""

from __future__ import annotations

import sys

import pytest

from stoker.pod.tracing import MAX_TRACEPARENT_BYTES, NoTracer, TracingMissing, trace_of, tracer_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_an_endpoint_the_parents_name_goes_on() -> None:
    tracer = tracer_of("stoker-router", {})
    assert isinstance(tracer, NoTracer)
    span = tracer.begin("router", PARENT, 1.0)
    assert (tracer.on, span.traceparent) == (False, PARENT)
    span.end(2.0, stoker__pod="p")
    tracer.record("queue", PARENT, 1.0, 2.0)
    tracer.close()


def test_an_endpoint_without_the_extra_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    text = r"OTEL_EXPORTER_OTLP_ENDPOINT is set, but spans cannot be exported: pip install 'stoker\[tracing\]'"
    with pytest.raises(TracingMissing, match=text):
        tracer_of("stoker-router", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})


def test_a_header_that_is_too_long_is_no_parent() -> None:
    assert trace_of(PARENT.encode()) == PARENT
    assert trace_of(b"0" * (MAX_TRACEPARENT_BYTES + 1)) == ""
