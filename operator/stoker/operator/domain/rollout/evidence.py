"""What the routers counted of two revisions in one window, read from their `/status` answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.pod.histogram import Histogram, merged


@dataclass(frozen=True)
class RevisionCounts:
    """One revision in one window. Times in seconds."""

    requests: int = 0
    errors: int = 0
    first_token_s: Histogram = field(default_factory=Histogram)
    token_gap_s: Histogram = field(default_factory=Histogram)
    queue_s: Histogram = field(default_factory=Histogram)
    """In engines' queues. Every router counts the requests of all routers here."""
    splits: int = 0
    """Requests whose prompt another engine was to compute; of all routers, too."""
    failed_splits: int = 0
    """Those of them whose transfer failed."""


@dataclass(frozen=True)
class Evidence:
    """Both revisions over the same time, and which reports are missing."""

    new: RevisionCounts = RevisionCounts()
    old: RevisionCounts = RevisionCounts()
    missing: tuple[str, ...] = ()
    """One line for each router whose counts are not known; with any, no share rises."""


def read_evidence(reports: Mapping[str, Mapping[str, Any] | None], window: str, new: str, old: str) -> Evidence:
    """Add up the reports of all routers.

    Args:
        reports: name of each Ready router -> its `/status`; None without one.
        window: the window that each must count in.
        new, old: names of the revisions.
    """
    missing, found = [], []
    for name, report in sorted(reports.items()):
        counted = (report or {}).get("window")
        if not isinstance(counted, Mapping):
            missing.append(f"router {name} has not reported")
        elif counted.get("id") != window:
            missing.append(f"router {name} has not begun the step")
        elif (counts := _read(counted.get("revisions"))) is None:
            missing.append(f"router {name} reports counts that cannot be read")
        else:
            found.append(counts)
    if not reports:
        missing.append("no router is ready")
    return Evidence(_sum(found, new), _sum(found, old), tuple(missing))


def _read(revisions: Any) -> list[tuple[str, RevisionCounts]] | None:
    """(revision, counts) of each entry; None where one is not of this form."""
    try:
        return [
            (
                str(entry["revision"]),
                RevisionCounts(
                    int(entry["requests"]),
                    int(entry["errors"]),
                    Histogram.from_wire(entry["first_token_s"]),
                    Histogram.from_wire(entry["token_gap_s"]),
                    Histogram.from_wire(entry.get("queue_s", {})),
                    int(entry.get("splits", 0)),
                    int(entry.get("failed_splits", 0)),
                ),
            )
            for entry in revisions
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _sum(reports: Sequence[list[tuple[str, RevisionCounts]]], name: str) -> RevisionCounts:
    by_router = [[counts for revision, counts in report if revision == name] for report in reports]
    mine = [counts for own in by_router for counts in own]
    queues = [merged(counts.queue_s for counts in own) for own in by_router]
    splits = [(sum(one.splits for one in own), sum(one.failed_splits for one in own)) for own in by_router]
    return RevisionCounts(
        sum(counts.requests for counts in mine),
        sum(counts.errors for counts in mine),
        merged(counts.first_token_s for counts in mine),
        merged(counts.token_gap_s for counts in mine),
        max(queues, key=lambda queue: queue.total, default=Histogram()),
        *max(splits, default=(0, 0)),
    )
