"""Bounds on the compiled CPU kernels that this process keeps. No torch.

Called once by `load`, before the first kernel is compiled.
"""

from __future__ import annotations

import os

KERNEL_CACHE_ENTRIES = 128
"""One per shape of a product: the sizes of some 25 decode steps. A kernel takes about 0.5 MB in each of the two caches
and some milliseconds to compile again. The libraries' own default, 1,024, lets a server of a tiny model grow by 1.2
GB."""
VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own cache, and the one that torch keeps above it. Both are read at the first product of bfloat16 numbers."""


def bound_kernel_caches() -> None:
    """Limit both caches, unless the environment does. Prompts have ever new lengths, and each length is a new shape."""
    for name in VARIABLES:
        os.environ.setdefault(name, str(KERNEL_CACHE_ENTRIES))
