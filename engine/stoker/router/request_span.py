"""The span of one request at the router. Its `traceparent` goes to the engines in place of the client's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from stoker.pod.tracing import TRACE_HEADER, Attribute, Tracer, trace_of
from stoker.router.answer import BackendAnswer
from stoker.router.connection import Outgoing
from stoker.router.request_class import CLASS_HEADER


@dataclass
class RequestSpan:
    """What is known of a request when its span ends."""

    attributes: dict[str, Attribute] = field(default_factory=dict)

    def answered(self, answer: BackendAnswer) -> None:
        """Note the engine, and the head of its answer."""
        self.attributes["http__response__status_code"] = answer.head.status
        self.attributes["stoker__pod"] = answer.backend.entry.pod_uid
        if named := answer.head.header(CLASS_HEADER):
            self.attributes["stoker__request_class"] = named.decode()

    def refused(self, status: int) -> None:
        """Note the router's own answer."""
        self.attributes["http__response__status_code"] = status


@contextmanager
def traced(
    tracer: Tracer, request: Outgoing, clock: Callable[[], float]
) -> Iterator[tuple[RequestSpan, list[Outgoing]]]:
    """Make the span of a request for the time of the block; yield it, and in a list the request that the engines get.

    The list lets the caller take the request out, so that its body can be freed.
    """
    parent = next((trace_of(value) for name, value in request.headers if name == TRACE_HEADER), "")
    span = tracer.begin("router", parent, clock())
    headers = [(name, value) for name, value in request.headers if name != TRACE_HEADER]
    own = [replace(request, headers=[*headers, (TRACE_HEADER, span.traceparent.encode())])]
    del request
    seen = RequestSpan({"http__route": own[0].target.partition(b"?")[0].decode("latin-1")})
    try:
        yield seen, own
    finally:
        span.end(clock(), **seen.attributes)
