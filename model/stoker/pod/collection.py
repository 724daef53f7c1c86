"""Garbage collection in a program that serves.

A full collection visits every object of the process, and all streams wait for it: 17 to 118 ms in the core of an engine
(figures in bench/gpu/README.md). Most objects are modules, classes and code that live as long as the process.
"""

from __future__ import annotations

import gc


def spare_from_collection() -> None:
    """Leave all objects that exist now out of later collections, and let these begin. Called once a program serves."""
    gc.freeze()
    gc.enable()
