"""An engine from the router's view, small enough to break at any byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import h11

from testing.free_port import free_port


class Exchange:
    """One request at the fake: read its body, then choose the answer."""

    def __init__(
        self, engine: FakeEngine, wire: h11.Connection, writer: asyncio.StreamWriter, request: h11.Request
    ) -> None:
        self.engine = engine
        self.wire = wire
        self.writer = writer
        self.path = request.target.decode()
        self.method = request.method.decode()
        self.headers = {key.decode(): value.decode() for key, value in request.headers}
        self.body = b""

    async def head(self, status: int, headers: dict[str, str]) -> None:
        await self.send(h11.Response(status_code=status, headers=list(headers.items())))

    async def data(self, text: str) -> None:
        await self.send(h11.Data(data=text.encode()))

    async def end(self) -> None:
        await self.send(h11.EndOfMessage())

    async def json(self, content: object, status: int = 200, **headers: str) -> None:
        body = json.dumps(content)
        await self.head(status, {"content-type": "application/json", "content-length": str(len(body)), **headers})
        await self.data(body)
        await self.end()

    async def send(self, event: h11.Event) -> None:
        self.writer.write(self.wire.send(event) or b"")
        await self.writer.drain()


Behaviour = Callable[[Exchange], Awaitable[None]]


async def say_hello(exchange: Exchange) -> None:
    await exchange.json({"pod": exchange.engine.pod_uid, "path": exchange.path, "headers": exchange.headers,
                         "body": exchange.body.decode()})  # fmt: skip


def stream(tokens: int, delay_s: float = 0.0) -> Behaviour:
    """Send events `{"pod", "n"}`, then `[DONE]`."""

    async def answer(exchange: Exchange) -> None:
        await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
        for n in range(tokens):
            await exchange.data(f"data: {json.dumps({'pod': exchange.engine.pod_uid, 'n': n})}\n\n")
            await asyncio.sleep(delay_s)
        await exchange.data("data: [DONE]\n\n")
        await exchange.end()

    return answer


class FakeEngine:
    """An engine whose `behaviour` answers everything but `/status` and `/readyz`."""

    def __init__(self, pod_uid: str, behaviour: Behaviour = say_hello) -> None:
        self.pod_uid = pod_uid
        self.behaviour = behaviour
        self.ready = True
        self.load: dict[str, object] | None = None
        """What it reports of its load; empty: nothing, but the stream stays open."""
        self.role = ""
        """The role of its pool; empty: a snapshot does not name it."""
        self.phase = "Serving"
        self.served = 0
        self.running = 0
        self.disconnects = 0
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def entry(self, **changes: object) -> dict[str, object]:
        role = {"role": self.role} if self.role else {}
        return {"url": self.url, "pod_uid": self.pod_uid, **role, **changes}

    async def start(self) -> FakeEngine:
        """Listen; the second time at the same port, which no connection gets meanwhile."""
        self.port = self.port or free_port()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    def kill(self) -> None:
        """Stop as kill -9 does: the port refuses, every connection is reset."""
        self._server.close()
        self.drop_connections()
        for task in self._tasks:
            task.cancel()

    def drop_connections(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        try:
            await self._serve(reader, writer)
        except (OSError, h11.ProtocolError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = h11.Connection(h11.SERVER)
        while True:
            exchange: Exchange | None = None
            while not isinstance(event := wire.next_event(), h11.EndOfMessage):
                if event is h11.NEED_DATA:
                    wire.receive_data(await reader.read(65536))
                elif isinstance(event, h11.Request):
                    exchange = Exchange(self, wire, writer, event)
                elif isinstance(event, h11.Data):
                    assert exchange is not None
                    exchange.body += bytes(event.data)
                else:
                    return
            assert exchange is not None
            await self._answer(exchange, reader)
            wire.start_next_cycle()

    @staticmethod
    def _is_cut(exchange: Exchange, answer: asyncio.Future[None]) -> bool:
        """Whether an answer has failed because its client has gone, which its write may see before the read does."""
        return exchange.writer.is_closing() and isinstance(answer.exception(), ConnectionError)

    async def _report_load(self, exchange: Exchange) -> None:
        """Report `load` every 20 ms, or nothing where it is None."""
        if self.load is None:
            return await exchange.json({}, 404)
        await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
        seq = 0
        while True:
            if self.load:
                await exchange.data(f"data: {json.dumps({'seq': seq, **self.load})}\n\n")
            seq += 1
            await asyncio.sleep(0.02)

    async def _answer(self, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        if exchange.path == "/status":
            return await exchange.json({"pod_uid": self.pod_uid, "phase": self.phase})
        if exchange.path == "/readyz":
            return await exchange.json({}, 200 if self.ready else 503)
        if exchange.path == "/load":
            return await self._report_load(exchange)
        self.running += 1
        answer = asyncio.ensure_future(self.behaviour(exchange))
        gone = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() or self._is_cut(exchange, answer):
                self.disconnects += 1
                raise ConnectionResetError
            answer.result()
            self.served += 1
        finally:
            self.running -= 1
            answer.cancel()
            gone.cancel()
            await asyncio.wait({answer, gone})
        return None
