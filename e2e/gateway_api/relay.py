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
def relay(host: str, port: int, sent: bytearray) -> Iterator[tuple[str, int]]:
    """Pass the bytes of connections on to `host:port`, both ways; yield the address to connect to.

    `sent` gets what goes there.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(lambda r, w: _serve(r, w, host, port, sent), own_address(), 0)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    try:
        yield server.sockets[0].getsockname()[:2]
    finally:
        asyncio.run_coroutine_threadsafe(_stop(server), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int, sent: bytearray
) -> None:
    """Serve one connection until either side, or the relay, ends it."""
    writers = [writer]
    try:
        inner_reader, inner_writer = await asyncio.open_connection(host, port)
        writers.append(inner_writer)
        there, back = _copy(reader, inner_writer, sent), _copy(inner_reader, writer, bytearray())
        ways = [asyncio.create_task(there), asyncio.create_task(back)]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
    except OSError:
        pass
    except asyncio.CancelledError:  # the relay ends, and so does this task
        for one in writers:
            one.transport.abort()
    for one in writers:
        one.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, copied: bytearray) -> None:
    while data := await reader.read(65536):
        copied += data
        writer.write(data)
        await writer.drain()


async def _stop(server: asyncio.Server) -> None:
    """Stop listening, and end everything else on the loop."""
    server.close()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(3):  # transports close in the loop's next turns
        await asyncio.sleep(0)
