"""The sockets of a client, so that its end can wait for theirs.

A TLS connection that is given up within an answer says farewell to the server on its own, after the client that opened
it has forgotten it. An event loop that closes before leaves an open socket behind, which the tests' rules make an error
of some later test.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import AddrInfoType


class Sockets:
    """The `socket_factory` of a connector."""

    def __init__(self) -> None:
        self._made: list[socket.socket] = []

    def __call__(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        self._made = [one for one in self._made if _is_open(one)] + [made]
        return made

    async def closed(self, within_s: float = 10) -> None:
        """Until every one of them is closed.

        Raises:
            TimeoutError: one stays open.
        """
        async with asyncio.timeout(within_s):
            while any(map(_is_open, self._made)):
                await asyncio.sleep(0.005)


def _is_open(one: socket.socket) -> bool:
    return one.fileno() != -1
