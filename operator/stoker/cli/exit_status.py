"""Exit codes of the `stoker` command itself; a program that a verb starts has those of docs/exit-codes.md."""

from __future__ import annotations

import errno

from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.command_line import INTERRUPTED as INTERRUPTED
from stoker.pod.command_line import WRONG_USAGE

FAILED = 1
"""What the command was asked for ended badly, or does not exist."""
WRONG_INPUT = WRONG_USAGE
"""The command line, a manifest or an option cannot be used, or is not supported yet."""
STORAGE_FAILED = EXIT_CODES[Cause.STORAGE_ERROR]
"""What was asked for is known, and cannot be written: a full or broken disk."""
FAILED_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def code_of_file(error: OSError) -> int:
    """The exit code where a file of the command line cannot be read or written: a wrong path, or a failed disk."""
    return STORAGE_FAILED if error.errno in FAILED_DISK else WRONG_INPUT
