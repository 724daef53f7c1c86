"""Names that one process of this machine holds at a time; they are free again when it ends in any way.

Called by the supervisor.
"""

from __future__ import annotations

import socket
import sys
from types import TracebackType
from typing import Self


class Reservations:
    """Names held as abstract Unix sockets. Systems other than Linux have none; there every name is free."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._held:
            self._held.pop().close()

    def take(self, name: str) -> bool:
        """Take a name; False when another process has it."""
        if sys.platform != "linux":
            return True
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            holder.bind(f"\0stoker-{name}")
        except OSError:
            holder.close()
            return False
        self._held.append(holder)
        return True
