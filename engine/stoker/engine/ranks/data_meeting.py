"""The meeting of data-parallel ranks that share experts: links to rank 0, then the group for tensors.

Called once by each core while it loads.
"""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path
from typing import NamedTuple

import msgpack
from torch.distributed import ProcessGroup

from stoker.engine.errors import ExecutorLost
from stoker.engine.ranks.data_place import DataPlace
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.rendezvous import MeetingPoint, join
from stoker.engine.ranks.step_links import StepLinks
from stoker.engine.ranks.watch import RankLimits

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

    def join(self, device: str) -> ProcessGroup:
        """Join the group for tensors. Called by all ranks together."""
        place = self.place
        if self.point is None:
            return join(place.rank, place.size, device, self.address, local_rank=0)
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
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place.meeting))
        listener.listen(place.size)
        listener.settimeout(MEET_S)
        while len(links) < place.size - 1:
            end, _ = listener.accept()
            end.settimeout(MEET_S)
            link = Link(end)
            links[msgpack.unpackb(link.receive())] = link
            end.settimeout(None)
    point = MeetingPoint()
    for link in links.values():
        link.send(msgpack.packb([point.host, point.port]))
    return Met(place, StepLinks(0, place.size, links, limits=limits), point, (point.host, point.port))


def _go_to_first(place: DataPlace, limits: RankLimits) -> Met:
    end = _connected(place.meeting, time.monotonic() + MEET_S)
    link = Link(end)
    link.send(msgpack.packb(place.rank))
    end.settimeout(MEET_S)
    host, port = msgpack.unpackb(link.receive())
    end.settimeout(None)
    return Met(place, StepLinks(place.rank, place.size, {0: link}, limits=limits), None, (host, port))


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
