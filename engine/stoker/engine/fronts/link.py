"""A stream between a front's process and its parent: questions with answers, and notices, in both directions.

A frame is a length of four bytes and a msgpack list `[kind, number, subject, value]`. Both ends are of one version: the
parent starts its fronts from its own files.

Used by `front_process` and by `front_program`, one for each end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import msgpack

log = logging.getLogger("stoker.engine")
ASK_S = 5.0
"""Longest wait for an answer."""
HEAD = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 2**20
Kind = Literal["ask", "answer", "fail", "tell"]
Handler = Callable[[Any], Awaitable[Any]]


class LinkLost(RuntimeError):
    """The other end has gone, or does not answer."""


class AskFailed(RuntimeError):
    """The other end answered with an error."""


class Link:
    """One end. `run` reads until the other end has gone."""

    def __init__(self, end: socket.socket, handlers: Mapping[str, Handler]) -> None:
        """`end`: a connected stream, owned by this object from now on; `handlers`: what answers each subject."""
        self._end, self._handlers = end, handlers
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False
        self.opened = asyncio.Event()
        """Set once frames can be sent."""

    async def run(self) -> None:
        """Read frames and handle them until the other end has gone."""
        reader, self._writer = await asyncio.open_connection(sock=self._end)
        self.opened.set()
        try:
            while True:
                (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
                if length > MAX_FRAME_BYTES:
                    raise LinkLost(f"a frame of {length} bytes")
                self._take(*msgpack.unpackb(await reader.readexactly(length), strict_map_key=False))
        except (asyncio.IncompleteReadError, OSError):
            pass  # it has gone
        finally:
            self.close()

    def tell(self, subject: str, value: Any = None) -> None:
        """Send a notice; one for an end that has gone is dropped."""
        self._send("tell", 0, subject, value)

    async def ask(self, subject: str, value: Any = None, timeout_s: float = ASK_S) -> Any:
        """Ask the other end.

        Raises:
            LinkLost: no answer in time.
            AskFailed: the answer is an error.
        """
        self._number += 1
        number = self._number
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send("ask", number, subject, value)
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError as error:
            raise LinkLost(f"no answer to {subject} in {timeout_s:g} s") from error
        finally:
            del self._waiting[number]

    def close(self) -> None:
        """End the stream; open questions fail."""
        self.closed = True
        for task in self._tasks:
            task.cancel()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(LinkLost("the other process has gone"))
        if self._writer is not None:
            self._writer.close()
        else:
            self._end.close()

    def _send(self, kind: Kind, number: int, subject: str, value: Any) -> None:
        if self.closed or self._writer is None:
            if kind == "ask":
                raise LinkLost("the other process has gone")
            return
        frame = msgpack.packb([kind, number, subject, value])
        self._writer.write(HEAD.pack(len(frame)) + frame)

    def _take(self, kind: Kind, number: int, subject: str, value: Any) -> None:
        if kind in ("ask", "tell"):
            task = asyncio.create_task(self._handle(kind, number, subject, value))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return  # it came too late
        if kind == "fail":
            answer.set_exception(AskFailed(value))
        else:
            answer.set_result(value)

    async def _handle(self, kind: Kind, number: int, subject: str, value: Any) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            try:
                result = await self._handlers[subject](value)
            except Exception as error:
                if kind == "ask":
                    self._send("fail", number, subject, f"{error}")
                else:
                    log.exception("front: the notice %s", subject)
                return
            if kind == "ask":
                self._send("answer", number, subject, result)
