"""One exchange with one backend: send the request, wait until its answer begins. Called by `Dispatch` and `Carrier`."""

from __future__ import annotations

from stoker.pod.stream_comments import without_comments
from stoker.router.answer import BackendAnswer
from stoker.router.backend import Backend, Candidate
from stoker.router.connection import Connection, Outgoing, Silent, Unreachable
from stoker.router.heads import of_rank


async def ask(candidate: Candidate, request: Outgoing) -> BackendAnswer:
    """Send the request, with the number of the data rank that was chosen, and wait for the first part of the answer's
    body.

    Raises:
        BackendError: nothing of an answer has come, so the request may go elsewhere.
    """
    backend, request = candidate.backend, of_rank(request, candidate.rank)
    with candidate.request():
        connection = await _connect(backend)
        stale = not connection.fresh
        try:
            return await _exchange(candidate, connection, request)
        except Unreachable:
            if not stale or backend.stalled:
                raise
        connection = await _connect(backend, fresh=True)  # the kept one was closed meanwhile: no fault
        return await _exchange(candidate, connection, request)


async def _connect(backend: Backend, *, fresh: bool = False) -> Connection:
    try:
        return await backend.connect(fresh=fresh)
    except Silent as silence:  # the request itself was not sent: another backend may have it
        raise Unreachable(str(silence)) from silence


async def _exchange(candidate: Candidate, connection: Connection, request: Outgoing) -> BackendAnswer:
    backend = candidate.backend
    silence_s = backend.times.silence_s
    try:
        with backend.unanswered(connection):
            head = await connection.exchange(request, silence_s)
            first = await connection.read(silence_s)
            if head.header(b"content-type").startswith(b"text/event-stream"):
                first = await _first_event(connection, first, silence_s)
    except BaseException:
        connection.close()
        raise
    return BackendAnswer(candidate, connection, head, first)


async def _first_event(connection: Connection, first: bytes, silence_s: float) -> bytes:
    """The first part of a stream behind its comments, which are no answer yet."""
    part = first
    while part and (not (first := without_comments(first)) or first.startswith(b":")):
        part = await connection.read(silence_s)
        first += part
    return first
