"""The sockets of a client, so that a test can wait until they are closed.

A TLS connection that is abandoned within an answer closes itself later, after its client has released it.

An event loop that ends earlier leaves an open socket behind, which pytest reports as an error of some later test.
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import AddrInfoType


class Sockets:
    """The sockets of one connector; pass it as `socket_factory`."""

    def __init__(self) -> None:
        self._made: list[socket.socket] = []

    def __call__(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        self._made = [one for one in self._made if _is_open(one)] + [made]
        return made

    async def closed(self, within_s: float = 120) -> None:
        """Wait until every socket is closed.

        Raises:
            TimeoutError: one stays open.
        """
        async with asyncio.timeout(within_s):
            while any(map(_is_open, self._made)):
                await asyncio.sleep(0.005)


def _is_open(one: socket.socket) -> bool:
    return one.fileno() != -1
