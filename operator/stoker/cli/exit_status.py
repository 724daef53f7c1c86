"""Exit codes of the `stoker` command itself; a program that a verb starts has those of docs/exit-codes.md."""

from __future__ import annotations

from stoker.pod.command_line import INTERRUPTED as INTERRUPTED
from stoker.pod.command_line import WRONG_USAGE

FAILED = 1
"""What the command was asked for ended badly, or does not exist."""
WRONG_INPUT = WRONG_USAGE
"""The command line, a manifest or an option cannot be used, or is not supported yet."""
