"""The seam between block memory and what moves it: ports, links and tickets.

Implemented by `in_process`, `cuda_ipc`, `shared_memory`, `tcp`, `nixl_port` and `execution.host_link`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.layout import ONE_CELL, BlockLayout, Grid
from stoker.engine.transfer.ticket import LinkMeter, SummedTicket, Ticket, TransferError

PROTOCOL = 1
"""Version of the messages between ports."""

MOST_MOVES = 4096
"""Blocks, or cells of blocks, of one write."""

Require = Literal["nvlink", "rdma", "any"]
"""What a deployment demands of its links."""

PROVIDES: dict[str, frozenset[Require]] = {
    "cuda-ipc": frozenset({"any", "nvlink"}),
    "in-process": frozenset({"any"}),
    "nixl": frozenset({"any", "rdma"}),
    "shared-memory": frozenset({"any"}),
    "tcp": frozenset({"any"}),
}
"""Transport -> the demands that it meets."""


class LayoutMismatch(TransferError):
    """Two engines whose blocks mean different things. Names the field and both values."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"{field} is {ours!r} here and {theirs!r} at the peer; they must be equal")
        self.field, self.ours, self.theirs = field, ours, theirs


class TransportRefused(TransferError):
    """No transport can be used. Names those that were tried, with the reason for each."""

    def __init__(self, tried: Sequence[tuple[str, str]], require: Require = "any") -> None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in tried) or "the peer offers none"
        super().__init__(f"no transport meets require: {require} ({reasons})")
        self.tried = tuple(tried)


class Move(NamedTuple):
    """One block of a transfer."""

    local: int
    """Row of this side's block memory."""
    remote: int
    """Slot of the other side."""
    generation: int = 0
    """Generation of the grant of that slot; 0 where slots are not granted."""


@dataclass(frozen=True)
class PortInfo:
    """What a peer needs to know of a port, as plain values."""

    pod_uid: str
    epoch: int
    """Grows with each start of the engine. A peer is (pod uid, epoch), which is never used again."""
    fingerprint: bytes
    """Of model, weights and the meaning of a block (`fingerprint`)."""
    layout: BlockLayout
    """Of one block of this rank."""
    slots: int
    """Slots of the landing zone, each of one block of `layout`."""
    endpoints: tuple[tuple[str, bytes], ...]
    """(transport, address), opaque to all but that transport's port; the preferred one first."""

    @property
    def peer(self) -> str:
        return f"{self.pod_uid}/{self.epoch}"

    def endpoint(self, transport: str) -> bytes | None:
        return dict(self.endpoints).get(transport)


class Cells(NamedTuple):
    """How a link cuts and joins blocks. Its moves name cells: `block * cuts.cells + cell`, `slot * joins + cell`."""

    cuts: Grid = ONE_CELL
    """Cells of a block of the writer."""
    joins: int = 1
    """Cells of a slot of the receiver."""
    ranks: int = 1
    """Ranks of the writer's engine, each with links of its own."""
    links: int = 1
    """Of these ranks to the receiver."""

    @property
    def repacks(self) -> bool:
        return self.cuts.cells > 1 or self.joins > 1


ONE_RANK = Cells()


class Link(Protocol):
    """The way to one peer."""

    transport: str
    """Name of what is really used."""
    meter: LinkMeter

    @property
    def lost(self) -> str | None:
        """Why it can carry nothing more; None while it can. Costs a system call at most."""
        ...

    def write(self, moves: Sequence[Move], tag: bytes) -> Ticket:
        """Begin to copy local blocks into the peer's slots. The blocks were computed by steps that have ended: nothing
        that is launched is waited for."""
        ...

    def close(self) -> None:
        """Release everything. May be called twice, and after the peer's death."""
        ...


class ReadableLink(Link, Protocol):
    """The way to a tier or store, from which blocks are fetched again. A peer's landing zone is never read."""

    def write(self, moves: Sequence[Move], tag: bytes) -> SummedTicket:
        """Begin to copy local blocks into slots. What was computed before this call is in them."""
        ...

    def read(self, moves: Sequence[Move], tag: bytes) -> SummedTicket:
        """Begin to copy slots into local blocks."""
        ...

    def fence(self, ticket: Ticket) -> None:
        """Let all that is computed from now on come after this transfer."""
        ...


class Arrival(NamedTuple):
    """A write of a peer that was taken: its blocks are in the landing zone, or will be when the writer announces them,
    where it maps the zone."""

    peer: str
    tag: bytes
    slots: tuple[Grant, ...]
    """Those that were written; those that were refused are left out."""


class BlockPort(Protocol):
    """One rank's end of all its links."""

    def describe(self) -> PortInfo: ...

    def connect(self, peer: PortInfo, cells: Cells = ONE_RANK) -> Link:
        """Open a link.

        Raises:
            LayoutMismatch: the peer's blocks mean something else.
            TransportRefused: the peer cannot be reached this way, with the reason.
        """
        ...

    def arrivals(self) -> list[Arrival]:
        """Writes that have ended since the last call, in order for each peer."""
        ...

    def close(self) -> None:
        """Close all links and release everything. May be called twice."""
        ...


def connect_best(
    ports: Sequence[tuple[str, BlockPort]], peer: PortInfo, require: Require = "any", cells: Cells = ONE_RANK
) -> Link:
    """Connect by the first port, in this order, that meets the demand and reaches the peer.

    Raises:
        LayoutMismatch: no transport can help.
        TransportRefused: every transport with the reason why it is not used.
    """
    tried: list[tuple[str, str]] = []
    for name, port in ports:
        if require not in PROVIDES[name]:
            tried.append((name, f"is not {require}"))
        elif peer.endpoint(name) is None:
            tried.append((name, "the peer does not offer it"))
        else:
            try:
                return port.connect(peer, cells)
            except TransportRefused as refused:
                tried += refused.tried
    raise TransportRefused(tried, require)
