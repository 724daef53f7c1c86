"""The endpoint of another deployment: of a fallback, or of a model that is served here too.

Made by `Backends` from the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.router.backend import Backend, Timeouts
from stoker.router.connection import Connection
from stoker.router.snapshot import BackendEntry, EndpointEntry


class Endpoint(Backend):
    """The endpoint of another deployment. Any of its routers may answer, so no pod is checked."""

    def __init__(self, target: EndpointEntry, times: Timeouts, clock: Callable[[], float]) -> None:
        super().__init__(BackendEntry(url=target.url, pod_uid=f"deployment {target.deployment}"), times, clock)
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
