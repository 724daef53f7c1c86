"""The smaller model's deployment that answers while no engine of this one can.

The request goes to that deployment's endpoint with its model's name, so its answer says which model spoke. It goes
there once: a request that comes from another deployment's fallback is never passed on.

Made by `Backends` from the snapshot; `Proxy` asks it last.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from stoker.pod.marked_streams import RESUME_HEADER
from stoker.router.backend import Backend, Timeouts
from stoker.router.connection import Connection, Outgoing
from stoker.router.snapshot import BackendEntry, FallbackEntry

FALLBACK_HEADER = b"x-stoker-fallback"
"""On a request: the deployment whose engines could not take it. On an answer: the deployment that gave it."""


class Fallback(Backend):
    """The endpoint of another deployment. Any of its routers may answer, so no pod is checked."""

    def __init__(self, target: FallbackEntry, times: Timeouts, clock: Callable[[], float]) -> None:
        super().__init__(BackendEntry(url=target.url, pod_uid=f"fallback {target.deployment}"), times, clock)
        self.target = target

    async def connect(self, *, fresh: bool = False) -> Connection:  # noqa: ARG002
        """Open a connection.

        Raises:
            Unreachable: it cannot be used now.
        """
        return await Connection.open(self.entry.address, self.times.connect_s)

    def give_back(self, connection: Connection) -> None:
        """Close it: another request may find another router."""
        connection.close()


def for_fallback(request: Outgoing, target: FallbackEntry, own: str) -> Outgoing | None:
    """The request with the other model's name; None where it names no model or has been passed on already.

    Args:
        own: name of the deployment that passes it on.
    """
    if any(name == FALLBACK_HEADER for name, _ in request.headers):
        return None
    try:
        body = json.loads(request.body)
    except ValueError:
        return None
    if not isinstance(body, dict) or "model" not in body:
        return None
    content = json.dumps({**body, "model": target.model}, ensure_ascii=False).encode()
    kept = [(name, value) for name, value in request.headers if name != RESUME_HEADER]
    return replace(request, headers=[*kept, (FALLBACK_HEADER, own.encode())], body=content)
