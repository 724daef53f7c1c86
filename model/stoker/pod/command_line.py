"""Exit codes of command-line parsing, the same for argparse and click: 64 for wrong usage, 130 for Ctrl-C.

Owns `CommandParser` (argparse) and `run_click`. The codes come from `causes` (docs/exit-codes.md). Called by the `main`
of every program; holds no state.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

from stoker.pod.causes import EXIT_CODES, Cause

if TYPE_CHECKING:
    import click

WRONG_USAGE = EXIT_CODES[Cause.CONFIG_INVALID]
INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose usage errors have the code of the table instead of 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(WRONG_USAGE, f"{self.prog}: error: {message}\n")


def run_click(program: click.Command, name: str) -> NoReturn:
    """Run a click program and end the process with its exit code."""
    import click  # only programs that are made with it

    try:
        code = program.main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(WRONG_USAGE if isinstance(error, click.UsageError) else error.exit_code)
    except click.Abort:
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)
