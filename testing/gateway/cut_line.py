"""A TCP line between a browser and a gateway that a test can cut and mend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK_BYTES = 64 * 1024


class CutLine:
    """Forwards every connection. While it is cut, open connections are gone and new ones end at once."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.port = 0
        self._broken = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._broken = True
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self._broken = False

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._forward(reader, writer)
        finally:
            self._tasks.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._broken:
            writer.transport.abort()
            return
        with contextlib.suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection(*self.target)
            pair = {writer, up_writer}
            if self._broken:  # it was cut meanwhile
                for one in pair:
                    one.transport.abort()
                return
            self._writers |= pair
            try:
                await asyncio.gather(_pump(reader, up_writer), _pump(up_reader, writer))
            finally:
                self._writers -= pair
                for one in pair:
                    one.close()

    async def close(self) -> None:
        """End every connection, and wait for its end."""
        self.cut()
        await asyncio.gather(*self._tasks)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until one side ends; then both do."""
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def cut_line(host: str, port: int) -> AsyncIterator[CutLine]:
    """Open a line on a free port of 127.0.0.1."""
    line = CutLine(host, port)
    server = await asyncio.start_server(line.accept, "127.0.0.1", 0)
    line.port = server.sockets[0].getsockname()[1]
    try:
        yield line
    finally:
        server.close()
        await line.close()
