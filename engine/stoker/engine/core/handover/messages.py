"""The wire between the cores of a decode engine D and a prefill engine P: frozen values as msgpack arrays.

    D -> P: PeerHello, Prefill, Credit, TakeOver, Cancel, Beat
    P -> D: PeerHello | PeerRefused, BlocksReady, Tokens, Commit | Cancelled | Failed, Beat

D names each dispatch once (`Prefill.id`, never used again), so a late message about an older one has an unknown id and
is ignored. `Commit` and `Cancelled` are the end of a dispatch at P: it writes no slot of it any more. After a `Failed`
writes may still be under way; `Cancelled` follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from stoker.engine.core.frames import FrameFormat, many, numbered, one
from stoker.engine.errors import ProtocolError, RequestRefused
from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.output_grammar import OutputGrammar
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.fingerprint import Fingerprint
from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.port import LayoutMismatch, PortInfo

HANDOVER_PROTOCOL = 7

FailureCode = Literal["refused", "transport", "aborted", "unknown"]


@dataclass(frozen=True, slots=True)
class PeerHello:
    """First message of each side of a connection."""

    port: PortInfo
    """Of rank 0."""
    facts: Fingerprint
    """What `port.fingerprint` is the digest of, so that a refusal can name a field."""
    host_id: str
    others: tuple[PortInfo, ...] = ()
    """Ports of the further ranks, by rank."""
    protocol: int = HANDOVER_PROTOCOL

    def refuse_other(self, theirs: PeerHello) -> None:
        """Compare what the two must have in common. Raises LayoutMismatch with the first field that differs."""
        if theirs.protocol != self.protocol:
            raise LayoutMismatch("protocol", self.protocol, theirs.protocol)
        self.facts.refuse_other(theirs.facts)

    @property
    def ports(self) -> tuple[PortInfo, ...]:
        """By rank."""
        return (self.port, *self.others)

    @property
    def layouts(self) -> list[BlockLayout]:
        return [port.layout for port in self.ports]

    @property
    def block_bytes(self) -> int:
        """Of all ranks together."""
        return sum(layout.block_bytes for layout in self.layouts)


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The two engines cannot exchange blocks."""

    field: str
    """Of the fingerprint or layout; `transport`: no way from P to D could be opened."""
    ours: str
    theirs: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute this prompt, send its blocks and the tokens behind it."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    """With a seed."""
    priority: int
    first_block: int
    """Blocks before it are in D's cache already."""
    slots: tuple[Grant, ...]
    trace: str = ""
    """`traceparent` of the request's span at D."""
    place: int = 0
    """The number of its class."""


@dataclass(frozen=True, slots=True)
class Credit:
    """More slots, and damaged blocks that are asked for once more."""

    id: str
    slots: tuple[Grant, ...]
    again: tuple[tuple[int, Grant], ...] = ()
    """(index of the block, its new slot)."""


class ReadyBlock(NamedTuple):
    place: int
    """In the request, in blocks."""
    slot: int
    generation: int
    sum: int
    """Seeded."""


@dataclass(frozen=True, slots=True)
class BlocksReady:
    """These blocks are in their slots."""

    id: str
    blocks: tuple[ReadyBlock, ...]


class Part(NamedTuple):
    """New output of one choice."""

    choice: int
    position: int
    """Number of the choice's tokens before these."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: Literal["stop", "length"] | None
    stop_token: int | None
    cached_tokens: int
    """Prompt tokens that P found in its prefix cache."""


@dataclass(frozen=True, slots=True)
class Tokens:
    id: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """D goes on alone."""

    id: str


@dataclass(frozen=True, slots=True)
class Commit:
    """P has stopped after a `TakeOver`."""

    id: str


@dataclass(frozen=True, slots=True)
class Cancel:
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """P does nothing for this id, or nothing any more."""

    id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """P has given the request up."""

    id: str
    code: FailureCode
    message: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Sign of life; P answers each of D's."""

    seq: int
    open: tuple[str, ...] = ()
    """D's: the dispatches that it waits for. P ends all others."""


PeerMessage = (
    PeerHello | PeerRefused | Prefill | Credit | BlocksReady | Tokens | TakeOver | Commit | Cancel | Cancelled | Failed
    | Beat
)  # fmt: skip

_FORMAT = FrameFormat(
    f"protocol {HANDOVER_PROTOCOL}",
    messages=(
        PeerHello, PeerRefused, Prefill, Credit, BlocksReady, Tokens, TakeOver, Commit, Cancel, Cancelled, Failed, Beat,
    ),
    nested={
        PeerHello: {"port": one(PortInfo), "facts": one(Fingerprint), "others": many(PortInfo)},
        PortInfo: {"layout": one(BlockLayout)},
        Prefill: {"params": one(SamplingParams), "slots": many(Grant)},
        SamplingParams: {"grammar": one(OutputGrammar)},
        Credit: {"slots": many(Grant), "again": numbered(Grant)},
        BlocksReady: {"blocks": many(ReadyBlock)},
        Tokens: {"parts": many(Part)},
        Part: {"logprobs": many(TokenLogprobs)},
    },
    packed={Prefill: ("prompt",)},
)  # fmt: skip


def pack_peer(message: PeerMessage) -> bytes:
    """Encode a message as one frame."""
    return _FORMAT.pack(message)


def unpack_peer(frame: bytes) -> PeerMessage:
    """Decode the message in a frame. Raises ProtocolError, also for sampling parameters that are not allowed."""
    try:
        message: PeerMessage = _FORMAT.unpack(frame)
    except RequestRefused as error:
        raise ProtocolError(f"not a message of protocol {HANDOVER_PROTOCOL}: {error}") from error
    return message
