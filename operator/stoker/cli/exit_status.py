"""Exit codes of the command line itself; programs that a verb starts bring their own (docs/exit-codes.md)."""

from __future__ import annotations

from stoker.pod.exit_code import EXIT_CODES, Cause

FAILED = 1
"""Something that was asked for ended badly, or is not there."""
WRONG_INPUT = EXIT_CODES[Cause.CONFIG_INVALID]
"""A manifest or an option cannot be used, or is not supported yet."""
INTERRUPTED = 130
"""Ctrl-C."""
