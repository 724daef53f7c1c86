"""Blocks that arrive for a request that is over: the landing zone refuses and counts each."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.engine.core.handover.messages import ReadyBlock
from stoker.engine.transfer.intake import Announcement, Intake, ReadySums
from stoker.engine.transfer.landing_zone import Grant, Owner
from stoker.engine.transfer.zone_memory import LockedZone


def count_stale(zone: LockedZone, owner: Owner, blocks: Sequence[ReadyBlock], now_s: float) -> None:
    """Announce the blocks to the zone, which has no slot of this owner."""
    with zone.lock:
        intake = Intake(zone.zone, owner, _copy_nothing, target=_no_place, seed=_no_place)
        intake.take([Announcement(one.place, Grant(one.slot, one.generation), 0) for one in blocks], now_s)


def _copy_nothing(slots: object, blocks: object) -> ReadySums:  # noqa: ARG001 - no slot passes before it
    return ReadySums()


def _no_place(index: int) -> int:
    raise AssertionError(f"block {index} has no place")
