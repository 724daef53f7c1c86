"""Messages between cores over ZeroMQ, sent and read by the core's own thread.

The core listens with a ROUTER and calls each peer with a DEALER, all with CURVE where there is a key: one key pair,
made from the deployment's secret, is both the servers' and the clients', so only who has the secret can talk or listen.
The end of a connection that this side opened is noticed at once by the socket's monitor.

ZeroMQ moves the bytes in a thread that needs no lock of the interpreter. A thread of Python would: a letter then waits
for as long as the core computes behind the call, up to the interpreter's switch interval of 5 ms.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq
from blake3 import blake3
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from stoker.engine.core.handover.desk import CALLER
from stoker.engine.core.handover.messages import PeerMessage, pack_peer, unpack_peer
from stoker.engine.core.handover.office import Gone, Letter
from stoker.engine.errors import ProtocolError

log = logging.getLogger("stoker.engine")

LINGER_MS = 200
MOST_FRAME_BYTES = 256 << 20
"""Of one message: a prompt of millions of tokens fits."""
END_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
"""Of a connection that is lost, could not be opened (`CLOSED`), or is with an engine of another key."""


@dataclass(frozen=True)
class CurveKeys:
    """A key pair in ZeroMQ's text form."""

    public: bytes
    secret: bytes


def curve_keys(secret: bytes) -> CurveKeys:
    """The pair that every engine with this secret has."""
    private = z85.encode(blake3(b"stoker hand-over", key=secret).digest())
    return CurveKeys(zmq.curve_public(private), private)


class OneKey:
    """Lets in those that have the deployment's pair."""

    def __init__(self, keys: CurveKeys) -> None:
        self.keys = keys

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - there is one domain
        return hmac.compare_digest(key, self.keys.public)


class PeerPost:
    """The sockets. All but the check of keys belongs to the thread that calls."""

    def __init__(self, host: str, port: int, keys: CurveKeys | None) -> None:
        """Bind at once. Raises OSError: the address cannot be used."""
        self._keys = keys
        self._context = zmq.Context()
        self._guard: ThreadAuthenticator | None = None
        if keys is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback("*", OneKey(keys))
        self._router = self._socket(zmq.ROUTER)
        if keys is not None:
            self._router.curve_server = True
        shown = f"[{host}]" if ":" in host else host
        try:
            self._router.bind(f"tcp://{shown}:{port or '*'}")
        except zmq.ZMQError as error:
            self._router.close()
            self._end_context()
            raise OSError(str(error)) from error
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._inbox: list[Letter] = []
        self._dealers: dict[str, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}
        """By endpoint: the connection and its monitor."""
        self._poller = zmq.Poller()
        self._poller.register(self._router, zmq.POLLIN)
        self._closed = False

    @property
    def wakers(self) -> Sequence[zmq.Socket[bytes]]:
        return [socket for socket, _ in self._poller.sockets]

    def call(self, endpoint: str, message: PeerMessage) -> None:
        if self._closed:
            return
        if endpoint not in self._dealers:
            try:
                self._dealers[endpoint] = self._dial(endpoint)
            except zmq.ZMQError as error:
                self._inbox.append(Letter(endpoint, Gone(str(error))))
                return
        with suppress(zmq.Again):
            self._dealers[endpoint][0].send(pack_peer(message), zmq.NOBLOCK)

    def answer(self, caller: str, message: PeerMessage) -> None:
        if self._closed:
            return
        with suppress(zmq.ZMQError):  # the caller has gone
            self._router.send_multipart([bytes.fromhex(caller.removeprefix(CALLER)), pack_peer(message)], zmq.NOBLOCK)

    def letters(self) -> list[Letter]:
        if self._closed:
            return []
        ready = {item for item, _ in self._poller.poll(0)}
        if self._router in ready:
            self._read_router()
        for endpoint, (dealer, monitor) in list(self._dealers.items()):
            if dealer in ready:
                self._read_dealer(endpoint, dealer)
            if monitor in ready:
                self._read_monitor(endpoint, dealer, monitor)
        letters, self._inbox = self._inbox, []
        return letters

    def hang_up(self, endpoint: str) -> None:
        dealer, monitor = self._dealers.pop(endpoint, (None, None))
        if dealer is None or monitor is None:
            return
        self._poller.unregister(dealer)
        self._poller.unregister(monitor)
        self._close_dealer(dealer, monitor)

    def close(self) -> None:
        """Send what waits, for a moment, and end. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for endpoint in list(self._dealers):
            self.hang_up(endpoint)
        self._router.close()
        self._end_context()

    def _dial(self, endpoint: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        dealer = self._socket(zmq.DEALER)
        if self._keys is not None:
            dealer.curve_serverkey = self._keys.public
        monitor = dealer.get_monitor_socket(END_EVENTS)
        try:
            dealer.connect(f"tcp://{endpoint}")
        except zmq.ZMQError:
            self._close_dealer(dealer, monitor)
            raise
        self._poller.register(dealer, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return dealer, monitor

    @staticmethod
    def _close_dealer(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        dealer.disable_monitor()
        monitor.close(0)
        dealer.close(LINGER_MS)

    def _read_router(self) -> None:
        with suppress(zmq.Again):
            while True:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
                if len(parts) == 2:
                    self._take(CALLER + parts[0].hex(), parts[1])

    def _read_dealer(self, endpoint: str, dealer: zmq.Socket[bytes]) -> None:
        with suppress(zmq.Again):
            while True:
                self._take(endpoint, dealer.recv(zmq.NOBLOCK))

    def _read_monitor(self, endpoint: str, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        event = recv_monitor_message(monitor)["event"]
        self._read_dealer(endpoint, dealer)  # what came before the end
        why = "the connection has ended" if event == zmq.EVENT_DISCONNECTED else "refused"
        self._inbox.append(Letter(endpoint, Gone(why)))
        self.hang_up(endpoint)

    def _take(self, name: str, frame: bytes) -> None:
        try:
            self._inbox.append(Letter(name, unpack_peer(frame)))
        except ProtocolError as error:
            log.error("peer %s: %s", name, error)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = self._context.socket(kind)
        sock.setsockopt(zmq.LINGER, LINGER_MS)
        sock.setsockopt(zmq.SNDHWM, 0)
        sock.setsockopt(zmq.RCVHWM, 0)
        sock.setsockopt(zmq.IPV6, 1)
        sock.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
        if self._keys is not None:
            sock.curve_publickey, sock.curve_secretkey = self._keys.public, self._keys.secret
        return sock

    def _end_context(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        self._context.term()
