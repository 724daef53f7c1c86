"""The landing zone: the only memory of an engine that its peers write to. The states of its slots; pure, no memory.

    FREE -> GRANTED -> READY -> COPIED -> FREE
               |         |         +--> GRANTED   what was stored is damaged: asked for once more
               |         +--> FREE                revoked after the writer had ended
               +--> QUARANTINED -> FREE           revoked or expired; the writer may still write

A slot leaves quarantine when the writer confirms, when it is proven dead, or after twice the time of its grant: a
writer posts nothing after its own grant has expired. Every grant has a new generation, so a message about an older one
is recognised. A slot that is being written or copied is never free, whatever happens to its request.

Not locked: `SharedZone` (`zone_memory`) serves ports that write from threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import Literal, NamedTuple

Reason = Literal["stale", "foreign", "late", "duplicate", "damaged"]
REASONS: tuple[Reason, ...] = ("stale", "foreign", "late", "duplicate", "damaged")


class BlockRefused(Exception):
    """A block, or a message about one, that must not be used."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class SlotState(Enum):
    FREE = "free"
    GRANTED = "granted"
    """One request's peer may write it."""
    READY = "ready"
    """Written, as its writer says."""
    COPIED = "copied"
    """Its bytes are in the cache and not yet compared."""
    QUARANTINED = "quarantined"
    """Given back, but its writer may not know."""


class Owner(NamedTuple):
    """For whom slots are granted."""

    peer: str
    """(pod uid, epoch) of the writer."""
    request: str
    attempt: int = 0


class Grant(NamedTuple):
    """The right to write a slot once."""

    slot: int
    generation: int


@dataclass(eq=False)
class _Slot:
    index: int
    state: SlotState = SlotState.FREE
    generation: int = 0
    owner: Owner | None = None
    until_s: float = 0.0
    """End of the grant, or of the quarantine."""
    seconds: float = 0.0
    """Length of the grant."""
    writing: set[int] = field(default_factory=set)
    """Cells that transports of this process write now; one without ranks is cell 0."""
    copying: bool = False
    """It is being copied into the cache now."""


@dataclass(frozen=True)
class ZoneAudit:
    """All slots counted one by one."""

    counts: dict[SlotState, int]
    faults: tuple[str, ...] = ()


class LandingZone:
    """The slots of one rank. Times are passed in, in seconds of the receiver's own clock."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a landing zone needs at least 1 slot, got {num_slots}")
        self.num_slots = num_slots
        self.refused: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._free = list(range(num_slots))
        """A heap: the lowest ones are granted first, so that neighbours come together and go in one copy."""

    @property
    def credits(self) -> int:
        """Slots that can be granted now."""
        return len(self._free)

    def state(self, slot: int) -> SlotState:
        return self._slots[slot].state

    def held(self, owner: Owner) -> list[int]:
        """Slots that the owner's request has, in any state."""
        return [index for index, slot in enumerate(self._slots) if slot.owner == owner]

    # Grants.

    def grant(self, owner: Owner, count: int, now_s: float, seconds: float) -> list[Grant]:
        """Grant up to `count` free slots for `seconds`. Fewer are flow control: ask again as slots come free."""
        granted = [heappop(self._free) for _ in range(min(count, len(self._free)))]
        return [self._begin(slot, owner, now_s, seconds) for slot in granted]

    def renew(self, owner: Owner, now_s: float) -> None:
        """Extend the owner's grants from now on: the writer has been heard of."""
        for slot in self._owned(owner, SlotState.GRANTED):
            slot.until_s = now_s + slot.seconds

    def revoke(self, owner: Owner, now_s: float) -> None:
        """Take back everything that the request has. Harmless for one that has nothing."""
        for slot in self._owned(owner, SlotState.GRANTED):
            self._quarantine(slot, now_s + 2 * slot.seconds)
        for slot in (*self._owned(owner, SlotState.READY), *self._owned(owner, SlotState.COPIED)):
            self._disown(slot)

    def confirm(self, owner: Owner) -> None:
        """The writer has confirmed the revocation: it will write none of these slots any more."""
        for slot in self._owned(owner, SlotState.QUARANTINED):
            self._disown(slot)

    def bury(self, peer: str) -> None:
        """The peer is proven dead: everything of it is free once nothing here uses it."""
        for slot in self._slots:
            if slot.owner is not None and slot.owner.peer == peer:
                self._disown(slot)

    def detach(self, peer: str, until_s: float) -> None:
        """The peer is gone, but its device may write what it has begun until then: free what it has written, and keep
        what it had still to write in quarantine."""
        for slot in self._slots:
            if slot.owner is None or slot.owner.peer != peer:
                continue
            if slot.state in (SlotState.GRANTED, SlotState.QUARANTINED):
                self._quarantine(slot, until_s)
            else:
                self._disown(slot)

    def expire(self, now_s: float) -> None:
        """Move on what time alone moves: grants into quarantine, quarantined slots to the free ones."""
        for slot in self._slots:
            if slot.state is SlotState.GRANTED and now_s >= slot.until_s:
                self._quarantine(slot, slot.until_s + 2 * slot.seconds)
            if slot.state is SlotState.QUARANTINED and now_s >= slot.until_s:
                self._disown(slot)

    # Writes.

    def begin_write(self, grant: Grant, peer: str, now_s: float, cell: int = 0) -> None:
        """A transport of this process is about to write the slot, or a cell of it, for a peer. Raises BlockRefused,
        counted."""
        self._writable(grant, peer, now_s, cell).writing.add(cell)

    def check_write(self, grant: Grant, peer: str, now_s: float, cell: int = 0) -> None:
        """A peer writes the slot, or a cell of it, by itself. Raises BlockRefused, counted."""
        self._writable(grant, peer, now_s, cell)

    def end_write(self, slot: int, cell: int = 0) -> None:
        """The transport has ended, in whatever way."""
        self._slots[slot].writing.discard(cell)
        self._free_if_unused(self._slots[slot])

    def announce(self, grant: Grant, owner: Owner, now_s: float) -> None:
        """The writer says that the slot holds its block: GRANTED -> READY. Raises BlockRefused, counted."""
        slot = self._checked(grant, now_s)
        if slot.owner != owner:
            raise self._refusal("foreign", f"slot {grant.slot} is granted to {slot.owner}, {owner} announced it")
        if slot.writing:
            raise self._refusal("duplicate", f"slot {grant.slot} is still being written")
        slot.state = SlotState.READY

    # Copies.

    def begin_copy(self, grant: Grant) -> None:
        """The bytes of a READY slot are about to be copied into the cache."""
        slot = self._current(grant, SlotState.READY)
        slot.copying = True

    def end_copy(self, grant: Grant) -> bool:
        """The bytes are in the cache: READY -> COPIED. False: its request has gone meanwhile, and it is free."""
        slot = self._slots[grant.slot]
        assert slot.copying, f"no copy of slot {grant.slot} has begun"
        slot.copying = False
        slot.state = SlotState.COPIED
        if slot.owner is not None:
            return True
        self._free_if_unused(slot)
        return False

    def free(self, grant: Grant) -> None:
        """What was stored is sound: COPIED -> FREE."""
        slot = self._current(grant, SlotState.COPIED)
        slot.owner, slot.state = None, SlotState.FREE  # nothing writes or copies it in this state
        heappush(self._free, slot.index)

    def grant_again(self, grant: Grant, now_s: float) -> Grant:
        """What was stored is damaged, counted: COPIED -> GRANTED to the same owner, with a new generation."""
        slot = self._current(grant, SlotState.COPIED)
        assert slot.owner is not None
        self.refused["damaged"] += 1
        return self._begin(grant.slot, slot.owner, now_s, slot.seconds)

    def is_current(self, grant: Grant, state: SlotState) -> bool:
        slot = self._slots[grant.slot]
        return slot.generation == grant.generation and slot.state is state and slot.owner is not None

    # Audit.

    def audit(self) -> ZoneAudit:
        """Count every slot anew."""
        counts = Counter(slot.state for slot in self._slots)
        return ZoneAudit({state: counts[state] for state in SlotState}, tuple(self._faults()))

    def _faults(self) -> Iterator[str]:
        free = {index for index, slot in enumerate(self._slots) if slot.state is SlotState.FREE}
        if len(self._free) != len(set(self._free)) or free != set(self._free):
            yield "the free list and the states differ"
        for index, slot in enumerate(self._slots):
            if slot.state is SlotState.FREE and (slot.owner is not None or slot.writing or slot.copying):
                yield f"slot {index} is free and in use"
            if slot.state is SlotState.GRANTED and slot.owner is None:
                yield f"slot {index} is granted to none"
            if slot.state is not SlotState.FREE and slot.owner is None and not (slot.writing or slot.copying):
                yield f"slot {index} is lost"

    # Parts.

    def _begin(self, index: int, owner: Owner, now_s: float, seconds: float) -> Grant:
        slot = self._slots[index]
        slot.state, slot.owner = SlotState.GRANTED, owner
        slot.generation += 1
        slot.seconds, slot.until_s = seconds, now_s + seconds
        return Grant(index, slot.generation)

    def _checked(self, grant: Grant, now_s: float) -> _Slot:
        """The slot of a grant that may still be used. Raises BlockRefused."""
        slot = self._slots[grant.slot] if 0 <= grant.slot < self.num_slots else None
        if (
            slot is None or slot.generation != grant.generation or slot.state is not SlotState.GRANTED
            or slot.owner is None or now_s >= slot.until_s
        ):  # fmt: skip
            raise self._why_ended(grant, slot)
        return slot

    def _why_ended(self, grant: Grant, slot: _Slot | None) -> BlockRefused:
        """The refusal of a grant that may not be used, counted."""
        if slot is None:
            return self._refusal("foreign", f"slot must be 0 to {self.num_slots - 1}, got {grant.slot}")
        if slot.generation != grant.generation:
            detail = f"generation {grant.generation} of slot {grant.slot}, the present one is {slot.generation}"
            return self._refusal("stale", detail)
        if slot.state in (SlotState.READY, SlotState.COPIED) and slot.owner is not None:
            return self._refusal("duplicate", f"slot {grant.slot} is {slot.state.value} already")
        return self._refusal("late", f"the grant of slot {grant.slot} has ended")

    def _writable(self, grant: Grant, peer: str, now_s: float, cell: int) -> _Slot:
        """The slot of a grant that this peer may write. Raises BlockRefused."""
        slot = self._checked(grant, now_s)
        assert slot.owner is not None
        if slot.owner.peer != peer:
            raise self._refusal("foreign", f"slot {grant.slot} is granted to {slot.owner.peer}, {peer} wrote it")
        if cell in slot.writing:
            raise self._refusal("duplicate", f"slot {grant.slot} is being written already")
        return slot

    def _current(self, grant: Grant, state: SlotState) -> _Slot:
        assert self.is_current(grant, state), f"slot {grant.slot} is not {state.value} in generation {grant.generation}"
        return self._slots[grant.slot]

    def _refusal(self, reason: Reason, detail: str) -> BlockRefused:
        self.refused[reason] += 1
        return BlockRefused(reason, detail)

    def _owned(self, owner: Owner, state: SlotState) -> list[_Slot]:
        return [slot for slot in self._slots if slot.owner == owner and slot.state is state]

    def _quarantine(self, slot: _Slot, until_s: float) -> None:
        slot.state, slot.until_s = SlotState.QUARANTINED, until_s

    def _disown(self, slot: _Slot) -> None:
        """Take the slot from its owner. One that a transport still writes waits in quarantine for its end."""
        slot.owner = None
        if slot.state is SlotState.GRANTED:
            slot.state = SlotState.QUARANTINED
        self._free_if_unused(slot)

    def _free_if_unused(self, slot: _Slot) -> None:
        """Free a slot without an owner once nothing of this process uses it."""
        if slot.owner is not None or slot.writing or slot.copying or slot.state is SlotState.FREE:
            return
        slot.state = SlotState.FREE
        heappush(self._free, slot.index)
