"""A setting of glibc's allocator: freed buffers stay with the process and are reused.

Called once per process, before the weights are loaded: by the trainer's rank and by the engine's loader. No torch.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_REUSED_BYTES = 32 * 2**20
"""Largest threshold that glibc takes."""
KEPT_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed buffers of up to 32 MiB for reuse.

    True where that worked; elsewhere (other libraries, other systems) nothing changes.

    Otherwise a buffer of more than 128 KiB may come fresh from the kernel each time, and its page faults take ten times
    as long as a norm or a rotation over 512 tokens.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = {M_MMAP_THRESHOLD: LARGEST_REUSED_BYTES, M_TRIM_THRESHOLD: KEPT_BYTES, M_TOP_PAD: LARGEST_REUSED_BYTES}
    worked = [mallopt(name, value) == 1 for name, value in wanted.items()]
    return all(worked)
