"""Processes for tests that begin with torch and what uses it: forked from one that has imported them.

A process that imports them anew needs seconds of processor time for it. The first of these processes starts the server;
it is the same one for all files of a test's process, and ends with that.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

PRELOADED = "testing.forked_modules"


def forked() -> Any:
    """Return the context of `multiprocessing` whose processes are forked from the server."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])
    return context
