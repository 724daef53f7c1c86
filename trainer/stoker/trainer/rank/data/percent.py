"""Progress of work on data files, as lines with a percent.

Called by `corpus` and `byte_bpe`.
"""

from __future__ import annotations

from collections.abc import Callable

Report = Callable[[str], None]


def percent_report(report: Report, what: str, total: int) -> Callable[[int], None]:
    """Return a callback for the bytes (or characters) done so far; it reports their percent of `total`.

    Each call reports, because the agent takes a report for progress; 100 is for what is done.
    """

    def progress(done: int) -> None:
        report(f"{what} {min(99, 100 * done // max(1, total))} %")

    return progress
