"""Launches of the small kernels of a pass: each may be set up while the one before it still runs.

That hides one or two microseconds per kernel.

Such a kernel calls `wait_for_last` before it touches anything that another kernel writes or reads. The one after it may
be set up from then on, and waits in turn; so all kernels before it are complete then.
Triton 3.6 and later; on devices before Hopper and in the interpreter the launches are ordinary.

Called by the small kernels of this folder.
"""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HOPPER = 90
"""First architecture that can, as Triton counts them."""


@functools.cache
def overlap() -> dict[str, Any]:
    """Return the launch arguments of a kernel that has a parameter OVERLAPS."""
    if triton.knobs.runtime.interpret or triton.runtime.driver.active.get_current_target().arch < HOPPER:
        return {"OVERLAPS": False}
    return {"OVERLAPS": True, "launch_pdl": True}


@triton.jit
def wait_for_last(OVERLAPS: tl.constexpr):
    """Let the next kernel be set up, and wait until the last one is complete."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
