"""The messages by which the leader lets each rank move its part of cache blocks, to other engines or to its slots in
main memory, and a rank's reports, in their msgpack form.

A rank carries calls out in order with its steps: what was computed before a call is in the blocks that it names, and
what is computed after it finds what the call has copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from typing import Any, NamedTuple, Protocol

from stoker.engine.transfer.block_part import BlockPart, Parts
from stoker.engine.transfer.layout import BlockLayout, Grid
from stoker.engine.transfer.port import Cells, Move, PortInfo


class OpenBlocks(NamedTuple):
    """Make the landing zone and the ports."""

    fingerprint: bytes
    pod_uid: str
    epoch: int
    zone_blocks: int
    folder: str
    """Of the sockets for peers of this host; empty for a rank of another pod, which has one of its own."""
    host: str
    port: int
    """The first of two; 0: any."""
    key: bytes
    """What links prove; empty for a rank of another pod, which reads it in its own."""
    require: str
    transports: tuple[str, ...]


class ConnectRank(NamedTuple):
    """Open a link to a rank of a peer."""

    link: int
    peer: PortInfo
    cells: Cells


class WriteCells(NamedTuple):
    """Send cells of blocks."""

    call: int
    link: int
    moves: tuple[Move, ...]
    tag: bytes


class SumCells(NamedTuple):
    """Sum the cells of blocks."""

    call: int
    blocks: tuple[int, ...]
    cells: Grid


class CopyCells(NamedTuple):
    """Join slots into blocks, and sum what was stored."""

    call: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]
    cells: Grid


class CloseLink(NamedTuple):
    """Close it behind the write under way."""

    link: int


class OpenTier(NamedTuple):
    """Make the slots of the host tier."""

    num_slots: int


class SaveBlocks(NamedTuple):
    """Copy blocks into slots."""

    call: int
    moves: tuple[Move, ...]


class LoadBlocks(NamedTuple):
    """Copy slots into blocks."""

    call: int
    moves: tuple[Move, ...]


class FenceSave(NamedTuple):
    """Let all that is computed from now on come after this save."""

    call: int


class OpenFiles(NamedTuple):
    """What blocks in files are. Their slots are open."""

    fingerprint: bytes
    salt: str
    layout: BlockLayout
    """Of whole blocks."""


class WritePart(NamedTuple):
    """Write a slot as the rank's part of a block."""

    call: int
    folder: str
    slot: int
    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


class ReadPart(NamedTuple):
    """Fill a slot from the parts of a block that are in files."""

    call: int
    folder: str
    slot: int
    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]
    parts: Parts


class OpenLane(NamedTuple):
    """Take a folder of the rank's own below this one, and begin it empty. Calls that name this one go there."""

    call: int
    folder: str


class RemovePart(NamedTuple):
    """Remove the rank's part of a block."""

    call: int
    folder: str
    digest: bytes


class TierOpened(NamedTuple):
    layout: BlockLayout | None
    """Of the rank's part of a block; None: there are no slots."""
    transport: str
    error: str
    """Why there are no slots; empty if there are."""


class BlocksOpened(NamedTuple):
    info: PortInfo | None
    nvlinks: int
    error: str
    """Why there are no ports; empty if there are."""


class LinkOpened(NamedTuple):
    link: int
    transport: str
    error: str
    """Why there is none; empty if there is."""


class CallEnded(NamedTuple):
    """Of any call with a number."""

    call: int
    sums: tuple[int, ...]
    """Of the cells of each block, one block after the other; to and from slots of its whole part."""
    bytes: int
    seconds: float
    error: str
    cause: str = ""
    """Of the error of a file."""


class LinkLost(NamedTuple):
    link: int
    why: str


class PeersLost(NamedTuple):
    """Peers that write no more to this rank."""

    peers: tuple[str, ...]


FileCall = OpenFiles | WritePart | ReadPart | OpenLane | RemovePart
TierCall = OpenTier | SaveBlocks | LoadBlocks | FenceSave | FileCall
BlockCall = OpenBlocks | ConnectRank | WriteCells | SumCells | CopyCells | CloseLink | TierCall
BlockReport = BlocksOpened | LinkOpened | CallEnded | LinkLost | PeersLost | TierOpened
BLOCK_CLASSES: tuple[type[Any], ...] = (
    OpenBlocks, ConnectRank, WriteCells, SumCells, CopyCells, CloseLink, OpenTier, SaveBlocks, LoadBlocks, FenceSave,
    OpenFiles, WritePart, ReadPart, OpenLane, RemovePart, BlocksOpened, LinkOpened, CallEnded, LinkLost, PeersLost,
    TierOpened,
)  # fmt: skip


Report = Callable[[BlockReport], None]
BUSY_S, IDLE_S = 0.001, 0.05
"""How often a rank looks for what has ended while something is under way, and while nothing is."""


class MovesBlocks(Protocol):
    """What carries out calls about a rank's part of blocks."""

    def do(self, call: BlockCall) -> None: ...

    def close(self) -> None: ...


def block_values(message: Any) -> list[Any]:
    """The message's fields as plain values."""
    return [astuple(value) if isinstance(value, PortInfo | BlockLayout) else value for value in message]


def block_message(cls: type[Any], values: list[Any]) -> Any:
    """The message of these fields."""
    if cls is ConnectRank:
        link, peer, cells = values
        return ConnectRank(link, _port_of(peer), Cells(Grid(*cells[0]), *cells[1:]))
    if cls is WriteCells:
        call, link, moves, tag = values
        return WriteCells(call, link, tuple(Move(*move) for move in moves), tag)
    if cls in (SaveBlocks, LoadBlocks):
        call, moves = values
        return cls(call, tuple(Move(*move) for move in moves))
    if cls in (SumCells, CopyCells):
        *others, cells = values
        return cls(*others, Grid(*cells))
    if cls in (OpenFiles, TierOpened):
        return cls(*(BlockLayout(*value) if isinstance(value, tuple | list) else value for value in values))
    if cls is ReadPart:
        *others, parts = values
        return cls(*others, tuple(BlockPart(*part) for part in parts))
    if cls is BlocksOpened:
        info, nvlinks, error = values
        return BlocksOpened(None if info is None else _port_of(info), nvlinks, error)
    return cls(*values)


def _port_of(values: tuple[Any, ...]) -> PortInfo:
    pod_uid, epoch, fingerprint, layout, slots, endpoints = values
    return PortInfo(pod_uid, epoch, fingerprint, BlockLayout(*layout), slots, tuple(map(tuple, endpoints)))
