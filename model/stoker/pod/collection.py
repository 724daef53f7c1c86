"""Garbage collection in programs.

A full collection visits every object of the process: 0.25 s of processor time for the 343,000 objects of an engine's
core on a slow machine, most of them modules, classes and code that live as long as the process. While a program serves,
all streams would wait for it; while a program imports, collections are a tenth of its processor time.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports() -> Iterator[None]:
    """Collect nothing while a program imports its modules, and leave them out of later collections but the last.

    At the end of the process they are collected: modules in C report as leaked what is not.
    """
    gc.disable()
    atexit.register(gc.unfreeze)
    try:
        yield
    finally:
        spare_from_collection()


def spare_from_collection() -> None:
    """Leave all objects that exist now out of later collections, and let these begin. Called once a program serves."""
    gc.freeze()
    gc.enable()
