"""The phase of an engine as clients see it: the core's, as far as fronts follow it. Pure.

Used by a front, and by the pool of several.
"""

from __future__ import annotations

from stoker.engine.core.messages import Phase


def front_phase(core: Phase, *, draining: bool, answers: bool) -> Phase:
    """Return the phase. `answers`: a front has what it needs beside a core that serves, as the tokenizer."""
    if core != "Serving":
        return core
    if draining:
        return "Draining"
    return core if answers else "Warming"
