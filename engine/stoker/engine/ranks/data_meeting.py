"""The meeting of data-parallel ranks that share experts: links to rank 0, then the group for tensors.

Called once by each core while it loads.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from pathlib import Path
from typing import NamedTuple

import msgpack
from torch.distributed import ProcessGroup

from stoker.engine.errors import ExecutorLost
from stoker.engine.ranks.data_place import DataPlace
from stoker.engine.ranks.handshake import HANDSHAKE_S, reach_leader, sealed_link
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.rendezvous import LOOPBACK, MeetingPoint, join
from stoker.engine.ranks.step_links import StepLinks
from stoker.engine.ranks.watch import RankLimits
from stoker.pod.installed_version import installed_version

log = logging.getLogger("stoker.engine")

MEET_S = 600.0
"""Longest wait for the other cores: they import and plan, and may fetch the model."""
PAUSE_S = 0.1


class Met(NamedTuple):
    """This rank has links to the others, and knows where the group meets."""

    place: DataPlace
    links: StepLinks
    point: MeetingPoint | None
    """Rank 0 holds it open."""
    address: tuple[str, int]
    host: str
    """This rank's own address towards the others."""

    def join(self, device: str) -> ProcessGroup:
        """Join the group for tensors. Called by all ranks together."""
        place = self.place
        if self.point is None:
            return join(place.rank, place.size, device, self.address, self.host, local_rank=0)
        try:
            return self.point.join(place.size, device)
        finally:
            self.point.close()


def meet(place: DataPlace, limits: RankLimits = RankLimits()) -> Met:  # noqa: B008 - frozen
    """Link this rank to the others. Raises ExecutorLost where they do not come."""
    try:
        return _wait_for_all(place, limits) if place.rank == 0 else _go_to_first(place, limits)
    except (TimeoutError, LinkClosed) as error:
        raise ExecutorLost(f"data rank {place.rank} has not met the others at {place.meeting}: {error}") from error


def _wait_for_all(place: DataPlace, limits: RankLimits) -> Met:
    """Wait for all other ranks, and tell them where the group meets."""
    links: dict[int, Link] = {}
    with _listener(place) as listener:
        listener.settimeout(MEET_S)
        while len(links) < place.size - 1:
            end, _ = listener.accept()
            try:
                rank, link = _admitted(place, end, set(links))
                links[rank] = link
            except (LinkClosed, ValueError, TypeError, TimeoutError) as error:
                log.warning("a connection is not taken as a data rank of this replica: %s", error)
                end.close()
    host = next(iter(links.values())).end.getsockname()[0] if place.key is not None else LOOPBACK
    point = MeetingPoint(host)
    for link in links.values():
        link.send(msgpack.packb(point.port))
    return Met(place, StepLinks(0, place.size, links, limits=limits), point, (point.host, point.port), host)


def _listener(place: DataPlace) -> socket.socket:
    if not isinstance(place.meeting, tuple):
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(place.meeting))
        listener.listen(place.size)
        return listener
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    return socket.create_server((place.host, place.meeting[1]), family=family, backlog=place.size)


def _admitted(place: DataPlace, end: socket.socket, known: set[int]) -> tuple[int, Link]:
    """Take a rank. Raises LinkClosed, TimeoutError or ValueError where it does not belong here."""
    link = Link(end) if place.key is None else sealed_link(end, place.key, serving=True)
    end.settimeout(HANDSHAKE_S)
    rank, version = msgpack.unpackb(link.receive())
    end.settimeout(None)
    if version != installed_version():
        raise ValueError(f"it is of version {version}, this rank of {installed_version()}")
    if rank in known or rank not in range(1, place.size):
        raise ValueError(f"it comes as rank {rank}, which is here already or none of 1 to {place.size - 1}")
    return rank, link


def _go_to_first(place: DataPlace, limits: RankLimits) -> Met:
    until_s = time.monotonic() + MEET_S
    if isinstance(place.meeting, tuple):
        assert place.key is not None, "ranks of several pods have one"
        link = reach_leader(place.meeting, place.key, lambda: time.monotonic() < until_s)
    else:
        link = Link(_connected(place.meeting, until_s))
    link.send(msgpack.packb([place.rank, installed_version()]))
    link.end.settimeout(MEET_S)
    port = msgpack.unpackb(link.receive())
    link.end.settimeout(None)
    first, own = (LOOPBACK, LOOPBACK) if place.key is None else (link.end.getpeername()[0], link.end.getsockname()[0])
    return Met(place, StepLinks(place.rank, place.size, {0: link}, limits=limits), None, (first, port), own)


def _connected(path: Path, until_s: float) -> socket.socket:
    """Connect to a socket that may appear later. Raises TimeoutError."""
    while True:
        end = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            end.connect(str(path))
            return end
        end.close()
        if time.monotonic() > until_s:
            raise TimeoutError(f"no rank 0 within {MEET_S:.0f} s")
        time.sleep(PAUSE_S)
