"""The leader's door for the ranks of other pods: each proves the replica's key and says which rank it is.

A thread accepts; `workers` takes the links from `joined`. The door closes when all ranks have joined.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading

from stoker.engine.ranks.handshake import HANDSHAKE_S, sealed_link
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.pod_place import PodPlace
from stoker.engine.ranks.wire import Join, unpack
from stoker.pod.installed_version import installed_version

log = logging.getLogger("stoker.engine")


class PodLinks:
    """Links to the ranks of other pods, as they come."""

    def __init__(self, place: PodPlace) -> None:
        """Listen. Raises OSError: the address is taken."""
        self.place = place
        self.joined: queue.SimpleQueue[tuple[Join, Link]] = queue.SimpleQueue()
        self._missing = set(place.others)
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        self._listener = socket.create_server((place.host, place.leader[1]), family=family, backlog=1024)
        self._thread = threading.Thread(target=self._accept, name="pods", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def missing_pods(self) -> tuple[int, ...]:
        """Numbers of the pods of which not all ranks have joined."""
        return tuple(sorted({rank // self.place.ranks_per_pod for rank in self._missing.copy()}))

    def close(self) -> None:
        """Take no more ranks. May be called twice."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(HANDSHAKE_S + 1)

    def _accept(self) -> None:
        while self._missing:
            try:
                end, address = self._listener.accept()
            except OSError:
                return  # closed
            try:
                self._admit(end)
            except (LinkClosed, ValueError) as error:
                log.warning("%s is not taken as a rank of this replica: %s", address[0], error)
                end.close()
        self._listener.close()

    def _admit(self, end: socket.socket) -> None:
        """Take a rank. Raises ValueError where it does not belong here."""
        link = sealed_link(end, self.place.key, serving=True)
        end.settimeout(HANDSHAKE_S)
        join = unpack(link.receive())
        end.settimeout(None)
        if not isinstance(join, Join) or join.rank not in self._missing:
            raise ValueError(f"it joins as {join}, ranks {sorted(self._missing)} are missing")
        if join.version != installed_version():
            raise ValueError(f"it is of version {join.version}, this pod of {installed_version()}")
        self._missing.discard(join.rank)
        self.joined.put((join, link))
