"""What several cores behind one front exchange with other engines, as one report. Pure.

Counts add up. Each core is a peer of its own: `copies` has them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stoker.engine.core.load_counters import LoadCounters
from stoker.engine.core.stats import PeerCopy, Stats, TransferStats

COUNTS = ("zone_slots", "free_slots", "receiving", "helping", "helping_waiting", "helping_tokens")
COUNTS_BY_NAME = ("outcomes", "fallbacks", "helps", "blocks", "refused", "bytes", "seconds")


def merged_transfer(cores: Sequence[Stats]) -> TransferStats | None:
    """The report over all cores; None without hand-over. What is equal at all of them is that of the first."""
    parts = [one.transfer for one in cores if one.transfer is not None]
    if not parts:
        return None
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in COUNTS}
    sums |= {name: _added(getattr(part, name) for part in parts) for name in COUNTS_BY_NAME}
    return replace(
        parts[0],
        **sums,
        avoided={endpoint: why for part in parts for endpoint, why in part.avoided.items()},
        unmet=next((part.unmet for part in parts if part.unmet), ""),
        prefill_tokens_per_s=_mean([part.prefill_tokens_per_s for part in parts]),
        handover_s=_mean([part.handover_s for part in parts]),
        rates={name: sums["bytes"][name] / seconds for name, seconds in sums["seconds"].items() if seconds > 0},
        copies=tuple(copy_of(one) for one in cores if one.transfer is not None),
        load=_added_loads(part.load for part in parts),
    )


def copy_of(core: Stats) -> PeerCopy:
    """One core as a peer of other engines."""
    assert core.transfer is not None, "it takes part"
    return PeerCopy(
        core.transfer.endpoint, core.transfer.epoch, core.running + core.waiting, core.transfer.helping_tokens
    )


def _added_loads(parts: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    total = LoadCounters()
    for part in parts:
        total.add(LoadCounters.from_wire(part))
    return total.to_wire()


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Any = Counter()  # seconds are no whole numbers
    for part in parts:
        total.update(part)
    return dict(total)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
