"""A request that this engine computes for another one. Values and states; no engine, no memory.

    QUEUED -> PREFILLING -> STREAMING -> HANDED | FINISHED | CANCELLED | FAILED

QUEUED: in the engine's queue. PREFILLING: blocks are being sent. STREAMING: its tokens go to the owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from stoker.engine.core.handover.messages import Part, Prefill, ReadyBlock
from stoker.engine.core.messages import Delta, RequestFacts
from stoker.engine.transfer.checksum import seeded
from stoker.engine.transfer.fingerprint import salt_digest
from stoker.engine.transfer.intake import Sums
from stoker.engine.transfer.landing_zone import Grant
from stoker.engine.transfer.ticket import Ticket


class HelpStage(Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    HANDED = "handed"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True)
class Writing:
    """Blocks on their way to the peer's zone."""

    ticket: Ticket
    sums: Sums
    """Of these blocks, with others before and after them."""
    first: int
    """Place of the first block's sum."""
    blocks: tuple[tuple[int, Grant], ...]
    """(index in the request, slot)."""

    @property
    def ended(self) -> bool:
        """Whether the blocks can be announced, or are lost."""
        return self.ticket.done() and (self.ticket.error() is not None or self.sums.done())

    def announcement(self, seed: Callable[[int], int]) -> tuple[ReadyBlock, ...]:
        """The blocks as they are announced once they are there. `seed`: of the block with an index."""
        return tuple(
            ReadyBlock(index, grant.slot, grant.generation, seeded(int(raw), seed(index)))
            for (index, grant), raw in zip(self.blocks, self.sums.values()[self.first :], strict=False)
        )


@dataclass(eq=False)
class Help:
    """One dispatch of a peer."""

    caller: str
    prefill: Prefill
    block_size: int
    """Of the peer, whose blocks are counted here; those of this engine may have another."""
    own_size: int
    stage: HelpStage = HelpStage.QUEUED
    slots: deque[Grant] = field(default_factory=deque)
    again: deque[tuple[int, Grant]] = field(default_factory=deque)
    writing: list[Writing] = field(default_factory=list)
    next_block: int = 0
    """Index of the first block that is not sent yet."""
    counts: list[int] = field(default_factory=list)
    """Tokens sent, by choice."""
    unfinished: set[int] = field(default_factory=set)
    cached_tokens: int = 0
    facts: RequestFacts | None = None
    """Of its first token."""

    def __post_init__(self) -> None:
        self.slots.extend(self.prefill.slots)
        self.next_block = self.prefill.first_block
        self.counts = [0] * self.prefill.params.n
        self.unfinished = set(range(self.prefill.params.n))

    @property
    def id(self) -> str:
        return self.prefill.id

    @property
    def salt(self) -> bytes:
        """Of the keys of its blocks."""
        return salt_digest(self.prefill.params.cache_salt)

    @property
    def num_own(self) -> int:
        """Full blocks of this engine in the prompt."""
        return len(self.prefill.prompt) // self.own_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the peer that can be sent: what is in full blocks here."""
        return self.blocks_in(self.num_own)

    @property
    def all_begun(self) -> bool:
        """Whether no block is left that has not been sent once."""
        return self.next_block >= self.num_blocks

    def blocks_in(self, num_own: int) -> int:
        """Full blocks of the peer in so many of this engine."""
        return num_own * self.own_size // self.block_size

    def take_slots(self, num_computed: int) -> list[tuple[int, Grant]]:
        """The blocks that can be sent now, each with its slot."""
        taken = list(self.again)
        self.again.clear()
        while self.slots and self.next_block < min(num_computed, self.num_blocks):
            taken.append((self.next_block, self.slots.popleft()))
            self.next_block += 1
        if taken and self.stage is HelpStage.QUEUED:
            self.stage = HelpStage.PREFILLING
        return taken

    def parts_of(self, deltas: Sequence[Delta]) -> tuple[Part, ...]:
        """The engine's deltas of this request, with positions."""
        return tuple(self._part(delta) for delta in deltas)

    def _part(self, delta: Delta) -> Part:
        self.stage = HelpStage.STREAMING
        if delta.facts is not None:
            self.cached_tokens = max(self.cached_tokens, delta.facts.cached_tokens)
        position = self.counts[delta.choice]
        self.counts[delta.choice] += len(delta.tokens)
        reason = delta.finish_reason
        if reason is not None:
            self.unfinished.discard(delta.choice)
        assert reason in (None, "stop", "length"), "a failed choice fails the whole help"
        return Part(
            delta.choice, position, delta.tokens, delta.logprobs, reason, delta.stop_token, self.cached_tokens
        )  # fmt: skip
