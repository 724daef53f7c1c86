"""How programs begin and end, the same for argparse and click: 64 for wrong usage, 130 for Ctrl-C, 68 for lost output.

Owns `CommandParser` (argparse), `run_program` and `run_click`. The codes come from `causes` (docs/exit-codes.md).
Called by the entry point of every program; holds no state.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.standard_streams import OutputLost, drop_output, guard_streams

if TYPE_CHECKING:
    import click

WRONG_USAGE = EXIT_CODES[Cause.CONFIG_INVALID]
INTERRUPTED = 130
CLOSED_OUTPUT = 1
"""Exit code where the reader of a pipe has left, as with click."""


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose usage errors have the code of the table instead of 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(WRONG_USAGE, f"{self.prog}: error: {message}\n")


def run_program(main: Callable[[], int | None], name: str) -> NoReturn:
    """Run a program and end the process with the code that `main` returns.

    Standard output that cannot be written ends it, too: with a line and the code of `StorageError`, and quietly with
    `CLOSED_OUTPUT` where the reader of a pipe has left.
    """
    guard_streams()
    try:
        try:
            code = main()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where its errors can be told: at the end of the process they have no code
    except OutputLost as error:
        drop_output()
        if error.has_no_reader:
            sys.exit(CLOSED_OUTPUT)
        sys.stderr.write(f"{name}: {error}\n")
        sys.exit(EXIT_CODES[Cause.STORAGE_ERROR])
    sys.exit(code)


def run_click(program: click.Command, name: str) -> NoReturn:
    """Run a click program and end the process with its exit code."""
    run_program(lambda: click_code(program, name), name)


def click_code(program: click.Command, name: str) -> int:
    """Run a click program and return its exit code."""
    import click  # only programs that are made with it

    try:
        code = program.main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return WRONG_USAGE if isinstance(error, click.UsageError) else error.exit_code
    except click.Abort:
        return INTERRUPTED
    return code if isinstance(code, int) else 0
