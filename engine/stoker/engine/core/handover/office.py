"""What the two desks of a core share: its engine, its blocks, the way to peers, and what is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.front_wire import Waker
from stoker.engine.core.handover.messages import PeerHello, PeerMessage
from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.messages import AddRequest, Outputs, RequestFacts
from stoker.engine.transfer.fingerprint import root_digest
from stoker.engine.transfer.intake import CopyAndSum, Sums
from stoker.engine.transfer.part_plan import PartPlan
from stoker.engine.transfer.port import Link, PortInfo
from stoker.engine.transfer.zone_memory import LockedZone
from stoker.pod.tracing import NoTracer, Tracer

GRANT_S = 5.0
"""Length of a slot's grant, renewed by each sign of life. A writer posts nothing after as long a silence."""
SILENT_S = 5.0
"""Silence after which a peer counts as lost."""
BEAT_S = 1.0
FEWEST_TOKENS = 16
"""Prompt tokens from which the time of a prefill says something."""

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
    """Carries messages between cores. Called by the core's thread alone."""

    @property
    def wakers(self) -> Sequence[Waker]:
        """What is readable while letters wait; nothing where they are read in each turn."""
        ...

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

    def copier(self, plan: PartPlan) -> CopyAndSum:
        """What copies slots that a peer has filled by this plan."""
        ...

    def sums(self, blocks: Sequence[Sequence[int]], plan: PartPlan) -> Sums:
        """Raw sums of blocks as a peer gets them by this plan, from the runs (`PartPlan.runs`) of cache blocks whose
        computation has been launched."""
        ...


class LocalPort(Protocol):
    """This engine's ports to peers: of each rank one for each transport."""

    def describe(self) -> tuple[PortInfo, ...]:
        """By rank."""
        ...

    def connect(self, peer: Sequence[PortInfo], plan: PartPlan) -> Future[Link]:
        """Open the best link, in a thread, to all ranks of a peer. Its moves name runs of tokens (`PartPlan.runs`).

        The future raises LayoutMismatch or TransportRefused.
        """
        ...

    def lost_peers(self) -> Sequence[str]:
        """Peers (`PortInfo.peer`) whose writing connection has ended since the last call; they write no more."""
        ...

    def meters(self) -> dict[str, tuple[int, float]]:
        """Transport -> bytes and seconds of what came in and went out."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Front:
    """What the core does for the desks."""

    add: Callable[[str, AddRequest], None]
    """Queue a request for a front; a refusal goes to it as a message."""
    withdraw: Callable[[str, str], None]
    """End a request (front, id) without an answer. Harmless for one that has ended."""
    send: Callable[[str, Outputs], None]


@dataclass
class Tally:
    """Counted since the start."""

    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))
    reasons: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))
    helps: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(HELPS, 0)))
    blocks: Counter[str] = field(default_factory=lambda: Counter(received=0, sent=0))
    handover_s: float | None = None
    """Mean of the last ones: from the last token of P to the first one here."""
    prefill_tokens_per_s: float | None = None
    """Mean over the last prompts that were computed for others."""
    load: LoadCounters = field(default_factory=LoadCounters)
    """Of prompts that are computed for others."""
    changes: int = 0
    """Grows when what routers know has changed."""
    last_transport: str = ""

    def handed_over(self, seconds: float) -> None:
        self.handover_s = _mean(self.handover_s, seconds)

    def prefilled(self, facts: RequestFacts) -> None:
        """Note the first token of a prompt that was computed for another engine."""
        if facts.scheduled_s is None or facts.first_token_s is None:
            return
        self.load.first_token(facts.first_token_s - facts.arrival_s)
        tokens, seconds = facts.prompt_tokens - facts.cached_tokens, facts.first_token_s - facts.scheduled_s
        if tokens >= FEWEST_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, tokens / seconds)


def _mean(before: float | None, new: float) -> float:
    return new if before is None else 0.8 * before + 0.2 * new


@dataclass(frozen=True)
class Office:
    """What both desks use. Everything but `post` and `port` belongs to the core's thread."""

    engine: LLMEngine
    hello: PeerHello
    zone: LockedZone
    store: BlockStore
    port: LocalPort
    post: Post
    front: Front
    clock: Callable[[], float]
    tally: Tally = field(default_factory=Tally)
    tracer: Tracer = field(default_factory=NoTracer)
    """For spans of prompts that are computed for others."""

    @property
    def root(self) -> bytes:
        """The parent of first blocks' contents."""
        return root_digest(self.hello.port.fingerprint)
