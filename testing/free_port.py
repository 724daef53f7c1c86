"""A port for a program that is started later: none that the kernel gives to a connection of another test meanwhile."""

from __future__ import annotations

import contextlib
import secrets
import socket

FIRST, LAST = 10_000, 32_000
"""Below the kernel's range for outgoing connections and for servers that name no port."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that is free now. It is drawn by chance, so that two who ask at the same time get two."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, FIRST + secrets.randbelow(LAST - FIRST)))
            return int(probe.getsockname()[1])
