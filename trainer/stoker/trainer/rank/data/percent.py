"""Progress of work on data files, as lines with a percent.

Called by `corpus` and `byte_bpe`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stoker.trainer.rank.data.files import DataFile

Report = Callable[[str], None]


def percent_report(report: Report, what: str, files: Sequence[DataFile]) -> Callable[[int], None]:
    """Return a callback for the bytes (or characters) done so far; it reports their percent of the files' bytes.

    Each call reports, because the agent takes a report for progress; 100 is for what is done.
    """
    total = max(1, sum(file.size for file in files))

    def progress(done: int) -> None:
        report(f"{what} {min(99, 100 * done // total)} %")

    return progress
