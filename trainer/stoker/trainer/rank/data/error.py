"""What can be wrong with a corpus. The program's exit code for it is `DataError` (docs/exit-codes.md)."""

from __future__ import annotations


class DataError(ValueError):
    """The corpus is missing, empty, unreadable, or not the one of the checkpoint; the message names file, line and what is allowed."""
