"""Why a block's file could not be read or written, also at another rank."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.engine.transfer.landing_zone import BlockRefused
from stoker.engine.transfer.port import LayoutMismatch
from stoker.engine.transfer.ticket import TransferError

CAUSES = ("foreign", "damaged", "failed", "missing")
"""Of something else; cut or changed; the disk's failure; gone, or a folder has its place.

The first of several ranks' counts.
"""


class FileFailed(Exception):
    """A rank could not."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


def cause_of(error: BaseException) -> str:
    """One of `CAUSES`."""
    if isinstance(error, FileFailed):
        return error.cause
    if isinstance(error, LayoutMismatch):
        return "foreign"
    if isinstance(error, TransferError | BlockRefused):
        return "damaged"
    return "missing" if isinstance(error, FileNotFoundError | IsADirectoryError) else "failed"


def worst(failures: Iterable[FileFailed]) -> FileFailed | None:
    """The failure that decides; None where there is none."""
    return min(failures, key=lambda one: CAUSES.index(one.cause), default=None)
