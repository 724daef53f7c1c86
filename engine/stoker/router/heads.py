"""The heads of a request and of its answer: what passes between a client and a backend, and what does not. Pure.

Called by `Proxy`.
"""

from __future__ import annotations

from dataclasses import replace

from stoker.pod.asgi import Scope
from stoker.pod.beginnings import BEGINNING_HEADER
from stoker.pod.class_place import PLACE_HEADER
from stoker.pod.data_rank import RANK_HEADER
from stoker.pod.marked_streams import RESUMABLE_PATHS, RESUME_HEADER
from stoker.pod.split_requests import PREFILL_HEADER
from stoker.pod.stream_comments import COMMENTS_HEADER
from stoker.router.answer_parser import Headers
from stoker.router.connection import Outgoing
from stoker.router.refusal import Refused

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)  # fmt: skip


def outgoing(scope: Scope, body: bytes, request_id: bytes, *, marked: bool = False) -> Outgoing:
    """Build the request for the backend: credentials and unknown headers pass, hop-by-hop headers do not.

    `marked`: ask for a stream that another backend could go on with.

    Raises:
        Refused: its head is one that servers take and clients may not send.
    """
    dropped = HOP_BY_HOP | {
        b"host",
        b"content-length",
        b"x-request-id",
        RESUME_HEADER,
        PREFILL_HEADER,
        PLACE_HEADER,
        RANK_HEADER,
        BEGINNING_HEADER,
        COMMENTS_HEADER,
        *_of_connection(scope),
    }
    headers = [(key, value.strip(b" \t")) for key, value in scope["headers"] if key not in dropped]
    headers += [(b"x-request-id", request_id), (COMMENTS_HEADER, b"0")]
    if marked and scope["path"] in RESUMABLE_PATHS:
        headers.append((RESUME_HEADER, b"1"))
    if scope.get("client"):
        headers.append((b"x-forwarded-for", str(scope["client"][0]).encode()))
    target = scope.get("raw_path") or scope["path"].encode()
    if scope.get("query_string"):
        target += b"?" + scope["query_string"]
    request = Outgoing(scope["method"], target, headers, body)
    if problem := request.problem:
        raise Refused(400, "invalid_request", f"The head of the request cannot be passed on: {problem}.")
    return request


def _of_connection(scope: Scope) -> set[bytes]:
    """Headers that the client names as its connection's alone (RFC 9110, 7.6.1)."""
    named = (value for key, value in scope["headers"] if key == b"connection")
    return {name.strip(b" \t").lower() for value in named for name in value.split(b",")}


def of_class(request: Outgoing, place: int | None) -> Outgoing:
    """The request with the number of its class for the engine; None: as it is."""
    if place is None:
        return request
    return replace(request, headers=[*request.headers, (PLACE_HEADER, b"%d" % place)])


def of_rank(request: Outgoing, rank: int | None) -> Outgoing:
    """The request with the number of the data rank that is to answer; None: as it is."""
    if rank is None:
        return request
    return replace(request, headers=[*request.headers, (RANK_HEADER, b"%d" % rank)])


def named(request: Outgoing, beginning: str) -> Outgoing:
    """The request with the name of its beginning; empty: as it is."""
    return (
        replace(request, headers=[*request.headers, (BEGINNING_HEADER, beginning.encode())]) if beginning else request
    )


def answer_headers(headers: Headers, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """Build the headers for the client from the backend's, with the request's id once."""
    dropped = HOP_BY_HOP | {b"x-request-id", RESUME_HEADER, b"date"}  # the server writes a date of its own
    kept = [(key, value) for key, value in headers if key not in dropped]
    return [*kept, (b"x-request-id", request_id)]
