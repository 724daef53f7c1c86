"""The command `stoker` in this process: its exit code and what it prints, without the start of an interpreter.

Only for verbs that end by themselves: one that becomes a program (`serve`, `chat`, ...) would replace the tests.
"""

from __future__ import annotations

import contextlib
import io
import sys
from unittest import mock

import pytest

from stoker.cli.main import stoker
from stoker.pod.command_line import click_code


def run_in_process(*words: str) -> tuple[int, str]:
    """Return the exit code of `stoker WORDS` and its output, standard error behind it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", ["stoker", *words]))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        ended = stack.enter_context(pytest.raises(SystemExit))
        sys.exit(click_code(stoker, "stoker"))
    code = ended.value.code
    assert isinstance(code, int)
    return code, out.getvalue() + err.getvalue()
