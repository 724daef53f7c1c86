"""Frames over a stream socket: four bytes of length, a code where the link is sealed, then so many bytes.

Used by `workers` (which reads what has arrived, of many links) and `worker` (which waits for the next frame). Links
between pods are sealed (`handshake`).
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
from collections.abc import Iterator

from blake3 import blake3

_LENGTH = struct.Struct("<I")
_PIECE = 1 << 16
CODE_BYTES = 16
MOST_FRAME_BYTES = 1 << 30


class LinkClosed(OSError):
    """The other side has closed the link or ended."""


class Seal:
    """Keyed codes over numbered frames, so that none can be forged, repeated or reordered on the way."""

    def __init__(self, send_key: bytes, receive_key: bytes) -> None:
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0

    def code(self, frame: bytes) -> bytes:
        """The code of the next frame to send."""
        self._sent += 1
        return _code(self._send_key, self._sent, frame)

    def check(self, code: bytes, frame: bytes) -> None:
        """Raise LinkClosed unless it is the code of the next frame."""
        self._received += 1
        if not hmac.compare_digest(code, _code(self._receive_key, self._received, frame)):
            raise LinkClosed("a frame with a wrong code: another key, or changed on the way")


class Link:
    """One end. Frames may be sent by several threads, and are read by one."""

    def __init__(self, end: socket.socket, seal: Seal | None = None, most_bytes: int = MOST_FRAME_BYTES) -> None:
        self.end, self.seal, self.most_bytes = end, seal, most_bytes
        self._sending = threading.Lock()
        self._rest = bytearray()

    def fileno(self) -> int:
        return self.end.fileno()

    def send(self, frame: bytes) -> None:
        """Send a frame. Waits while the socket's buffer is full. Raises LinkClosed."""
        try:
            with self._sending:
                code = self.seal.code(frame) if self.seal is not None else b""
                self.end.sendall(_LENGTH.pack(len(frame)) + code + frame)
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

    def cut(self) -> None:
        """End the connection; a thread that sends or waits gets LinkClosed."""
        with contextlib.suppress(OSError):  # the other side has ended it
            self.end.shutdown(socket.SHUT_RDWR)

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
        if length > self.most_bytes:
            raise LinkClosed(f"a frame of {length} bytes, at most {self.most_bytes} are allowed")
        begin = _LENGTH.size + (CODE_BYTES if self.seal is not None else 0)
        end = begin + length
        if len(self._rest) < end:
            return None
        code, frame = bytes(self._rest[_LENGTH.size : begin]), bytes(self._rest[begin:end])
        del self._rest[:end]
        if self.seal is not None:
            self.seal.check(code, frame)
        return frame


def _code(key: bytes, number: int, frame: bytes) -> bytes:
    return blake3(number.to_bytes(8, "little") + frame, key=key).digest(CODE_BYTES)
