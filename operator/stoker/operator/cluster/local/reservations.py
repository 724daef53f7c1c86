"""Names that only one process of this machine can hold at a time, and that are free again when it ends, however it ends."""

from __future__ import annotations

import socket
import sys
from types import TracebackType
from typing import Self


class Reservations:
    """Abstract Unix sockets; elsewhere than on Linux there are none, and every name can be taken."""

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
        """False when another process has the name."""
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
