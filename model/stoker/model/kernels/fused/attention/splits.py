"""Number of splits into which the keys of a decode step are cut, and the places of their partial results.

Free of Triton, so that buffers can be planned anywhere.

Called by `decode`; `sequences` and `paged_buffers` hold its scratch memory.
"""

from __future__ import annotations

import torch

MAX_SPLITS = 32
MIN_SPLITS = 4
"""Used also where there are enough programs: the longest sequences must not be the last to finish."""
WANTED_PROGRAMS = 4096
SMALL_PROGRAMS = 16
"""Sequences times kv heads of what is a small launch."""


def num_splits(num_rows: int, num_kv_heads: int) -> int:
    """Return the splits of each sequence in a launch over so many rows: a power of two."""
    wanted = WANTED_PROGRAMS // max(1, num_rows * num_kv_heads)
    return max(MIN_SPLITS, min(MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1)))


def is_small(num_rows: int, num_kv_heads: int) -> bool:
    """Whether there are so few programs that small tiles, each in a split of its own, are fastest."""
    return num_rows * num_kv_heads <= SMALL_PROGRAMS


def split_keys(num_rows: int, num_kv_heads: int) -> int:
    """Return the fewest keys of a split.

    With few programs the time is the longest chain of tiles; with many it is the parts' way through memory.
    """
    if is_small(num_rows, num_kv_heads):
        return 32
    programs = num_rows * num_kv_heads
    return 128 if programs <= 64 else 256 if programs <= 512 else 1024


class DecodeScratch:
    """Made once for a size, so that graphs keep the addresses; launches that follow one another on a stream may share
    it.
    """

    def __init__(
        self, max_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | str
    ) -> None:
        parts = max((rows * num_splits(rows, num_kv_heads) for rows in range(1, max_rows + 1)), default=0)
        self.out = torch.empty(parts * num_heads * head_dim, dtype=torch.float32, device=device)
        """[rows, K, splits, G, H]: weighted values of each split."""
        self.sums = torch.empty(2 * parts * num_heads, dtype=torch.float32, device=device)
        """[2, rows, K, splits, G]: running maximum, then sum."""
        self.arrived = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)
        """Splits that are done, per sequence and kv head; 0 between launches."""
