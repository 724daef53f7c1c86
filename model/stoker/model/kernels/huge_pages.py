"""Weights side by side in memory of large pages, so that reading them all costs few look-ups of addresses.

A pass over weights of some hundred megabytes in pages of 4 KiB waits for the table of pages again and again: about a
tenth of the time of a product of one row. Large pages are a request: a kernel that has none keeps small ones, and all
else is equal.

Called by `decoder` for kernels that read weights as they are stored.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

log = logging.getLogger("stoker.model")

PAGE = 2**21
"""Bytes of a large page."""
ALIGNMENT = 64
"""In bytes: each tensor begins with a line of the cache."""


def gather(tensors: Sequence[Tensor]) -> None:
    """Move tensors on the CPU, in place, into one piece of memory, which goes when the last of them goes.

    Tensors of other devices or layouts stay where they are. Pages are handed out as they are written, and each tensor's
    old memory goes before the next one is copied. Views that were made before keep the old memory.
    """
    moved = [tensor for tensor in tensors if is_movable(tensor)]
    if not moved:
        return
    places = offsets([tensor.nbytes for tensor in moved])
    memory = large_pages(places[-1])
    for tensor, begin in zip(moved, places, strict=False):
        copy = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = copy.copy_(tensor.data)


def is_movable(tensor: Tensor) -> bool:
    is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
    return is_plain and tensor.nbytes > 0


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return where tensors of so many bytes begin, and the end of all."""
    places = [0]
    for size in sizes:
        places.append(places[-1] - -size // ALIGNMENT * ALIGNMENT)
    return places


def large_pages(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] of unwritten memory that begins with a large page."""
    pages = mmap.mmap(-1, num_bytes + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_large_pages(pages)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE
    return whole[begin : begin + num_bytes]


def ask_for_large_pages(pages: mmap.mmap) -> None:
    try:
        pages.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as error:  # another system, or a kernel that was built without them
        log.info("the weights stay in small pages: %s", error)
