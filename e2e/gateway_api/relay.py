"""An endpoint on this machine's own address for a pod that has a loopback address, which EndpointSlices do not take."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator


def own_address() -> str:
    """Return an address of this machine that is not loopback.

    Raises:
        OSError: it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it only chooses the address of a route
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def relay(host: str, port: int) -> Iterator[tuple[str, int]]:
    """Pass the bytes of connections on to `host:port`, both ways; yield the address to connect to."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(lambda r, w: _serve(r, w, host, port), own_address(), 0)

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield server.sockets[0].getsockname()[:2]
    finally:
        asyncio.run_coroutine_threadsafe(_stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Serve one connection until either side ends it."""
    with contextlib.suppress(OSError):
        inner_reader, inner_writer = await asyncio.open_connection(host, port)
        ways = [asyncio.create_task(_copy(reader, inner_writer)), asyncio.create_task(_copy(inner_reader, writer))]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        inner_writer.close()
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def _stop() -> None:
    """End everything else on the loop."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
