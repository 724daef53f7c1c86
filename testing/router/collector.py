"""A stand-in for a collector of spans: it takes OTLP over HTTP and keeps what came."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Collected:
    """One span."""

    name: str
    id: str
    parent: str
    begin_ns: int
    end_ns: int
    service: str
    instance: str
    attributes: dict[str, Any]


class Collector:
    """Listens while it is entered."""

    def __init__(self) -> None:
        self._spans: defaultdict[str, dict[str, Collected]] = defaultdict(dict)
        self._lock = threading.Lock()
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces", self.path
                take(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def names(self, trace: str) -> set[str]:
        """Names of the spans of a trace so far."""
        with self._lock:
            return set(self._spans[trace])

    def trace(self, trace: str) -> dict[str, Collected]:
        """The spans of a trace by name."""
        with self._lock:
            return dict(self._spans[trace])

    def _take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._lock:
            for group in request.resource_spans:
                resource = _attributes(group.resource.attributes)
                for scope in group.scope_spans:
                    for span in scope.spans:
                        self._spans[span.trace_id.hex()][span.name] = Collected(
                            span.name, span.span_id.hex(), span.parent_span_id.hex(), span.start_time_unix_nano,
                            span.end_time_unix_nano, str(resource["service.name"]),
                            str(resource.get("service.instance.id", "")), _attributes(span.attributes),
                        )  # fmt: skip


def _attributes(listed: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in listed}
