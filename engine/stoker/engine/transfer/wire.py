"""One connection between two ports: authenticated messages, and bytes that follow them.

    frame = length (u32, little-endian), code (16 bytes), message (a msgpack array); then the bytes it announces

Both ends prove that they know the deployment's key before the first message, and every frame has a keyed code over its
number, so that frames cannot be forged, repeated or reordered. The bytes of blocks are not encrypted: they are compared
by their checksum, which travels inside of a frame. Where the network may be listened to, encrypt it below (a mesh,
WireGuard).

Plain sockets, and not ZeroMQ with CURVE: the receiver reads straight into the landing zone, and the sender hands its
blocks to the kernel in place. ZeroMQ owns its buffers, which costs a copy on each side, and CURVE encrypts every byte
in software.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgpack
from blake3 import blake3

from stoker.engine.transfer.port import PROTOCOL
from stoker.engine.transfer.ticket import PeerLost, TransferError

MOST_FRAME_BYTES = 1 << 20
NO_KEY = bytes(32)
"""For sockets that the file system protects."""
_LENGTH = struct.Struct("<I")
_CODE_BYTES = 16
_NONCE_BYTES = 32
_MOST_PARTS = 512
"""Buffers in one call of sendmsg; the kernel takes 1,024."""


class Wire:
    """A connected socket. One thread may send while another receives."""

    def __init__(self, sock: socket.socket, key: bytes, *, server: bool) -> None:
        """Prove to each other that both know the key. Raises PeerLost where the peer does not."""
        self._socket = sock
        self._sending = threading.Lock()
        self._sent = self._received = 0
        ours = os.urandom(_NONCE_BYTES)
        self._send_all([ours])
        theirs = self._receive_exactly(_NONCE_BYTES)
        client, serving = (theirs, ours) if server else (ours, theirs)
        session = blake3(b"session" + client + serving, key=key).digest()
        self._send_key = blake3(b"server" if server else b"client", key=session).digest()
        self._receive_key = blake3(b"client" if server else b"server", key=session).digest()
        self.send(["proof", PROTOCOL])
        if self.receive()[:1] != ["proof"]:
            raise PeerLost("the peer sent no proof of the key")

    def send(self, message: list[Any], payload: Iterable[memoryview] = ()) -> None:
        """Send a message and the bytes after it. A part is asked for once the one before it is sent."""
        packed: bytes = msgpack.packb(message)
        with self._sending:
            code = _code(self._send_key, self._sent, packed)
            self._sent += 1
            self._send_all([_LENGTH.pack(len(packed)) + code + packed])
            for part in payload:
                self._send_all([part])

    def receive(self) -> list[Any]:
        """Wait for a message.

        Raises:
            PeerLost: the connection has ended.
            TransferError: not a message of a peer that knows the key.
        """
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if length > MOST_FRAME_BYTES:
            raise TransferError(f"a message of {length} bytes, at most {MOST_FRAME_BYTES} are allowed")
        code = self._receive_exactly(_CODE_BYTES)
        packed = self._receive_exactly(length)
        if not hmac.compare_digest(code, _code(self._receive_key, self._received, packed)):
            raise TransferError("a message with a wrong code: another key, or changed on the way")
        self._received += 1
        try:
            message = msgpack.unpackb(packed)
        except (ValueError, msgpack.UnpackException) as error:
            raise TransferError(f"not a message: {error}") from error
        if not isinstance(message, list):
            raise TransferError("a message is an array")
        return message

    def receive_into(self, target: memoryview) -> None:
        """Fill the target with the bytes that follow a message."""
        place = 0
        while place < len(target):
            place += self._checked(self._call(self._socket.recv_into, target[place:]))

    def send_descriptor(self, descriptor: int) -> None:
        """Send an open file to a process of this host."""
        self._call(socket.send_fds, self._socket, [b"f"], [descriptor])

    def receive_descriptor(self) -> int:
        _, descriptors, _, _ = self._call(socket.recv_fds, self._socket, 1, 1)
        if len(descriptors) != 1:
            raise PeerLost("the peer sent no memory")
        return int(descriptors[0])

    def shut(self) -> None:
        """End the connection; a thread that waits on it sees PeerLost. May be called twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and give its descriptor back, which no other thread may be reading from: the number may be
        another file's at once. May be called twice."""
        self.shut()
        self._socket.close()

    @property
    def ended(self) -> bool:
        """Whether the peer has closed the connection, or this end is closed. Does not wait."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
        except ValueError:
            return True
        return bool(poll.poll(0))

    def _receive_exactly(self, length: int) -> bytes:
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return bytes(data)

    def _send_all(self, parts: Sequence[bytes | memoryview]) -> None:
        left = [memoryview(part) for part in parts]
        while left:
            sent = self._call(self._socket.sendmsg, left[:_MOST_PARTS])
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if left:
                left[0] = left[0][sent:]

    @staticmethod
    def _checked(count: int) -> int:
        if not count:
            raise PeerLost("the peer has closed the connection")
        return count

    @staticmethod
    def _call(function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (OSError, ValueError) as error:
            raise PeerLost(f"the connection is lost: {error}") from error


def _code(key: bytes, number: int, packed: bytes) -> bytes:
    return blake3(number.to_bytes(8, "little") + packed, key=key).digest(_CODE_BYTES)
