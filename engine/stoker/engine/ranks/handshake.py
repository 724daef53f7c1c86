"""The sealed link between a rank of another pod and the leader: both prove that they know the replica's key.

Called by `pod_links` on the leader's side and by `worker_main` on the other.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable

from blake3 import blake3

from stoker.engine.ranks.link import MOST_FRAME_BYTES, Link, LinkClosed, Seal

log = logging.getLogger("stoker.engine")

HANDSHAKE_S = 5.0
"""Longest wait for the other side's proof."""
CONNECT_S = 5.0
PAUSE_S = 0.5
"""Between two tries to reach the leader."""
UNHEARD_MS = 20_000
"""After so long without an acknowledgement of what was sent, the other host counts as gone."""
_NONCE_BYTES = 32
_PROOF = b"stoker ranks 1"


def sealed_link(end: socket.socket, key: bytes, *, serving: bool) -> Link:
    """Prove the key to each other, and return the link. Raises LinkClosed where the other side cannot."""
    end.settimeout(HANDSHAKE_S)
    ours = os.urandom(_NONCE_BYTES)
    try:
        end.sendall(ours)
        theirs = _exactly(end, _NONCE_BYTES)
    except OSError as error:
        raise LinkClosed(str(error)) from error
    asking, answering = (theirs, ours) if serving else (ours, theirs)
    session = blake3(b"ranks" + asking + answering, key=key).digest()
    keys = [blake3(side, key=session).digest() for side in (b"leader", b"rank")]
    link = Link(end, Seal(*(keys if serving else reversed(keys))), most_bytes=len(_PROOF))
    link.send(_PROOF)
    if link.receive() != _PROOF:
        raise LinkClosed("the other side is of another version")
    link.most_bytes = MOST_FRAME_BYTES
    end.settimeout(None)
    _keep_alive(end)
    return link


def reach_leader(address: tuple[str, int], key: bytes, alive: Callable[[], bool]) -> Link:
    """Connect to the leader, which may start later, until it answers or `alive` no longer holds.

    Raises:
        LinkClosed: `alive` no longer holds.
    """
    told, pause = "", threading.Event()
    while alive():
        end = None
        try:
            end = socket.create_connection(address, CONNECT_S)
            return sealed_link(end, key, serving=False)
        except OSError as error:  # LinkClosed, too; and names that are not known yet
            if end is not None:
                end.close()
            if str(error) != told:
                told = str(error)
                log.info("waiting for the leader of the replica at %s:%d: %s", *address, told)
        pause.wait(PAUSE_S)
    raise LinkClosed("this pod ends")


def _exactly(end: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = end.recv(length - len(data))
        if not piece:
            raise LinkClosed("the other side has closed the link")
        data += piece
    return data


def _keep_alive(end: socket.socket) -> None:
    if end.family not in (socket.AF_INET, socket.AF_INET6):
        return
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNHEARD_MS)
