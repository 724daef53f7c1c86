"""The hang detector: one deadline per phase for the time without an event. Used by the agent alone.

Any event of a rank is progress. A rank may wait for another one that is in a longer phase, so the longest deadline
among the phases of the pod's ranks counts for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.trainer.protocol.config import DeadlineConfig
from stoker.trainer.protocol.messages import Phase

EXIT_S = 60.0
"""Seconds between a rank's end event and the end of its process."""


@dataclass(frozen=True)
class Heartbeat:
    """The last event of one rank."""

    phase: Phase
    progressed_at: float
    """Seconds on a monotonic clock."""


@dataclass(frozen=True)
class Hang:
    """A rank without an event for longer than the phases of its pod allow."""

    rank: int
    phase: Phase
    silent_s: float
    allowed_s: float


def deadline_s(phase: Phase, deadlines: DeadlineConfig) -> float:
    """Longest time without an event in this phase."""
    return {
        "Loading": deadlines.load_s,
        "FirstStep": deadlines.first_step_s,
        "Training": deadlines.step_s,
        "Saving": deadlines.save_s,
        "Validating": deadlines.validation_s,
        "Finishing": deadlines.save_s,
        "Exited": EXIT_S,
    }[phase]


def find_hang(heartbeats: Mapping[int, Heartbeat], deadlines: DeadlineConfig, now: float) -> Hang | None:
    """The rank with the oldest event, if that is too old. `heartbeats` holds the ranks whose processes run."""
    if not heartbeats:
        return None
    allowed = max(deadline_s(heartbeat.phase, deadlines) for heartbeat in heartbeats.values())
    rank, heartbeat = min(heartbeats.items(), key=lambda item: item[1].progressed_at)
    silent = now - heartbeat.progressed_at
    return Hang(rank, heartbeat.phase, silent, allowed) if silent > allowed else None
