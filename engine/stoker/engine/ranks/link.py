"""Frames over a stream socket: four bytes of length, then so many bytes.

Used by `workers` (which reads what has arrived, of many links) and `worker` (which waits for the next frame).
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16


class LinkClosed(OSError):
    """The other side has closed the link or ended."""


class Link:
    """One end. Frames may be sent by several threads, and are read by one."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._sending = threading.Lock()
        self._rest = bytearray()

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame. Waits while the socket's buffer is full. Raises LinkClosed."""
        try:
            with self._sending:
                self.end.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def receive(self) -> bytes:
        """Wait for the next frame. Raises LinkClosed."""
        while (frame := self._next()) is None:
            self._read(0)
        return frame

    def arrived(self) -> Iterator[bytes]:
        """Frames that have arrived, without waiting; called when the socket is readable. Raises LinkClosed at its
        end, after the last frame."""
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        while (frame := self._next()) is not None:
            yield frame

    def close(self) -> None:
        self.end.close()

    def _read(self, flags: int) -> None:
        try:
            piece = self.end.recv(_PIECE, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise LinkClosed(str(error)) from error
        if not piece:
            raise LinkClosed("the other side has closed the link")
        self._rest += piece

    def _next(self) -> bytes | None:
        if len(self._rest) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._rest)
        end = _LENGTH.size + length
        if len(self._rest) < end:
            return None
        frame = bytes(self._rest[_LENGTH.size : end])
        del self._rest[:end]
        return frame
