"""When silence is a hang: one deadline per phase, judged by the agent alone.

Progress is any sign of a rank. A rank may be waiting for another one that is in a longer phase, so the longest deadline among the phases of
the pod's ranks counts for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.trainer.protocol.channel import Phase
from stoker.trainer.protocol.config import DeadlineConfig

EXIT_S = 60.0
"""From a rank's word that it ends to the end of its process."""


@dataclass(frozen=True)
class Pulse:
    """The last sign of one rank."""

    phase: Phase
    progressed_at: float
    """Seconds on a clock that only moves forward."""


@dataclass(frozen=True)
class Silence:
    """A rank that has been silent for longer than its pod's phases allow."""

    rank: int
    phase: Phase
    silent_s: float
    allowed_s: float


def deadline_s(phase: Phase, deadlines: DeadlineConfig) -> float:
    return {
        "Loading": deadlines.load_s,
        "FirstStep": deadlines.first_step_s,
        "Training": deadlines.step_s,
        "Saving": deadlines.save_s,
        "Validating": deadlines.validation_s,
        "Finishing": deadlines.save_s,
        "Exited": EXIT_S,
    }[phase]


def find_silence(pulses: Mapping[int, Pulse], deadlines: DeadlineConfig, now: float) -> Silence | None:
    """The rank that has been silent longest, when that is too long. `pulses` holds the ranks whose processes run."""
    if not pulses:
        return None
    allowed = max(deadline_s(pulse.phase, deadlines) for pulse in pulses.values())
    rank, pulse = min(pulses.items(), key=lambda item: item[1].progressed_at)
    silent = now - pulse.progressed_at
    return Silence(rank, pulse.phase, silent, allowed) if silent > allowed else None
