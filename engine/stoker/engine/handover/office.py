"""What the two desks of a core share: its engine, its blocks, the way to peers, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.messages import AddRequest, Outputs
from stoker.engine.handover.messages import PeerHello, PeerMessage
from stoker.engine.transfer.fingerprint import root_digest
from stoker.engine.transfer.intake import CopyAndSum
from stoker.engine.transfer.port import Link, PortInfo
from stoker.engine.transfer.zone_memory import SharedZone

GRANT_S = 5.0
"""Length of a slot's grant, renewed by each sign of life. A writer posts nothing after as long a silence."""
SILENT_S = 5.0
"""Silence after which a peer counts as lost."""
BEAT_S = 1.0

Reason = Literal[
    "unreachable", "lost", "silent", "refused", "incompatible", "transport", "damaged", "full", "late", "short",
    "unsupported",
]  # fmt: skip
REASONS: tuple[Reason, ...] = (
    "unreachable", "lost", "silent", "refused", "incompatible", "transport", "damaged", "full", "late", "short",
    "unsupported",
)  # fmt: skip
"""Why a request that names a prefill engine is computed here."""
OUTCOMES = ("split", "prefill_only", "local", "cancelled")
HELPS = ("handed", "finished", "cancelled", "failed", "refused")


@dataclass(frozen=True)
class Gone:
    """The connection to a peer has ended."""

    why: str


class Letter(NamedTuple):
    """What has come from a peer: its endpoint if this side called it, else its caller name."""

    peer: str
    message: PeerMessage | Gone


class Post(Protocol):
    """Carries messages between cores, in threads of its own."""

    def call(self, endpoint: str, message: PeerMessage) -> None:
        """Send to an engine that listens, connecting first if need be. Never waits, never fails."""
        ...

    def answer(self, caller: str, message: PeerMessage) -> None:
        """Send to an engine that has called."""
        ...

    def letters(self) -> list[Letter]:
        """All that has come since the last call, in order for each peer."""
        ...

    def hang_up(self, endpoint: str) -> None:
        """End a connection that this side opened, with what is still to be sent. Harmless without one."""
        ...

    def close(self) -> None: ...


class BlockStore(Protocol):
    """The cache's blocks and the zone's slots as memory."""

    copy_and_sum: CopyAndSum

    def sums(self, blocks: Sequence[int]) -> Sequence[int]:
        """Raw sums of cache blocks that are computed."""
        ...


class LocalPort(Protocol):
    """This engine's ports to peers, one for each transport."""

    def describe(self) -> PortInfo: ...

    def connect(self, peer: PortInfo) -> Future[Link]:
        """Open the best link, in a thread. The future raises LayoutMismatch or TransportRefused."""
        ...

    def lost_peers(self) -> Sequence[str]:
        """Peers (`PortInfo.peer`) whose writing connection has ended since the last call; they write no more."""
        ...

    def meters(self) -> dict[str, tuple[int, float]]:
        """Transport -> bytes and seconds of what came in and went out."""
        ...

    def close(self) -> None: ...


class Front(Protocol):
    """What the core does for the desks."""

    def add(self, front: str, request: AddRequest) -> None:
        """Queue a request for `front`; a refusal goes to it as a message."""
        ...

    def withdraw(self, front: str, request_id: str) -> None:
        """End a request without an answer. Harmless for one that has ended."""
        ...

    def send(self, front: str, outputs: Outputs) -> None: ...


@dataclass
class Tally:
    """Counted since the start."""

    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    reasons: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))
    helps: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(HELPS, 0)))
    blocks: Counter[str] = field(default_factory=lambda: Counter(received=0, sent=0))
    handover_s: float | None = None
    """Mean of the last ones: from the last token of P to the first one here."""
    last_transport: str = ""

    def handed_over(self, seconds: float) -> None:
        self.handover_s = seconds if self.handover_s is None else 0.8 * self.handover_s + 0.2 * seconds


@dataclass(frozen=True)
class Office:
    """What both desks use. Everything but `post` and `port` belongs to the core's thread."""

    engine: LLMEngine
    hello: PeerHello
    zone: SharedZone
    store: BlockStore
    port: LocalPort
    post: Post
    front: Front
    clock: Callable[[], float]
    tally: Tally = field(default_factory=Tally)

    @property
    def root(self) -> bytes:
        """The parent of first blocks' contents."""
        return root_digest(self.hello.port.fingerprint)
