"""The prefill engines that a decode engine calls, and those that it does not call for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stoker.engine.core.handover.messages import PeerHello
from stoker.engine.core.handover.office import SILENT_S, Reason
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.part_plan import WHOLE, PartPlan, plan_parts
from stoker.engine.transfer.port import LayoutMismatch

HELLO_S = 2.0
"""Longest wait for a peer's first message."""
SHUNNED_S = 5.0
"""Time for which a peer that could not be used is not tried again."""
UNLINKED_S = 60.0
"""The same for one that found no way for its blocks: each try may take seconds of a request."""
DAMAGED_S = 60.0
MOST_DAMAGED = 3
"""Damaged blocks of a peer within `DAMAGED_S` after which it is not used for as long."""


@dataclass(eq=False)
class Peer:
    """A prefill engine that this one calls."""

    endpoint: str
    asked_s: float
    heard_s: float
    hello: PeerHello | None = None
    plan: PartPlan = WHOLE
    """The parts of its blocks, once it has introduced itself."""
    damaged_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_DAMAGED))

    def meet(self, hello: PeerHello, own: Sequence[BlockLayout]) -> bool:
        """Take its introduction. False: its blocks cannot become blocks of `own` layouts."""
        self.hello = hello
        try:
            self.plan = plan_parts(hello.layouts, own)
        except LayoutMismatch:
            return False
        return True


@dataclass(frozen=True)
class Shunned:
    """A peer that is not called for a while."""

    until_s: float
    reason: Reason
    why: str = ""
    """More about the reason; empty for one that could not be reached."""


class Peers:
    """Peers by endpoint. Values and times; it sends nothing."""

    def __init__(self) -> None:
        self._peers: dict[str, Peer] = {}
        self._shunned: dict[str, Shunned] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[Peer]:
        return iter(list(self._peers.values()))

    def find(self, endpoint: str) -> Peer | None:
        return self._peers.get(endpoint)

    def add(self, endpoint: str, now_s: float) -> None:
        """Add a peer that is being called."""
        self._peers[endpoint] = Peer(endpoint, now_s, now_s)

    def remove(self, peer: Peer, reason: Reason, shunned_until_s: float, why: str = "") -> bool:
        """Remove a peer. One that was not just lost is shunned. False: it is gone already."""
        if self._peers.pop(peer.endpoint, None) is None:
            return False
        if reason != "lost":
            self._shunned[peer.endpoint] = Shunned(shunned_until_s, reason, why)
        return True

    def avoided(self, now_s: float) -> dict[str, str]:
        """The peers that are not called although they can be reached, each with the reason."""
        self._shunned = {endpoint: one for endpoint, one in self._shunned.items() if now_s < one.until_s}
        return {endpoint: f"{one.reason}: {one.why}" for endpoint, one in self._shunned.items() if one.why}

    def shun_reason(self, endpoint: str, now_s: float) -> Reason | None:
        """Why this peer is not called now."""
        shunned = self._shunned.get(endpoint)
        return shunned.reason if shunned is not None and now_s < shunned.until_s else None

    def note_damage(self, endpoint: str, count: int, now_s: float) -> Peer | None:
        """Count damaged blocks; returns the peer when they are too many in a short time."""
        peer = self._peers.get(endpoint)
        if peer is None:
            return None
        peer.damaged_s.extend([now_s] * count)
        too_many = len(peer.damaged_s) == MOST_DAMAGED and now_s - peer.damaged_s[0] < DAMAGED_S
        return peer if too_many else None

    def overdue(self, now_s: float) -> list[tuple[Peer, Reason]]:
        """The peers whose first message, or next sign of life, is late."""
        late: list[tuple[Peer, Reason]] = []
        for peer in self:
            if peer.hello is None and now_s - peer.asked_s > HELLO_S:
                late.append((peer, "unreachable"))
            elif peer.hello is not None and now_s - peer.heard_s > SILENT_S:
                late.append((peer, "silent"))
        return late
