"""Number of splits into which the keys of a decode step are cut, and the places of their partial results.

Free of Triton, so that buffers can be planned anywhere.

Called by `decode`; `sequences` and `paged_buffers` hold its scratch memory.
"""

from __future__ import annotations

import torch

MAX_SPLITS = 32
"""Of sequences below `MAX_SPLITS * LONG_KEYS` keys: the last program to finish adds the parts one after another."""
LONG_KEYS = 1024
"""Keys of a split from which on further splits are worth their parts."""
LONG_SPLITS = 128
"""Most splits of a longer sequence."""
LONG_PROGRAMS = 512
"""Programs that longer sequences are cut for where few rows give fewer: four for each multiprocessor, whose loads hide
each other's latency. 256 left memory at 2.8 TB/s for one sequence of 120,000 keys."""
MIN_SPLITS = 4
"""Used also where there are enough programs: the longest sequences must not be the last to finish."""
WANTED_PROGRAMS = 4096
SMALL_PROGRAMS = 16
"""Sequences times kv heads of what is a small launch."""


def num_splits(num_rows: int, num_kv_heads: int, max_keys: int = 0) -> int:
    """Return the most splits of each sequence in a launch over so many rows: a power of two.

    `max_keys`: those of the longest sequence that the launch may serve.
    """
    programs = max(1, num_rows * num_kv_heads)
    most = MAX_SPLITS
    if max_keys > MAX_SPLITS * LONG_KEYS:
        most = max(most, min(LONG_SPLITS, power_of_two(LONG_PROGRAMS // programs)))
    return max(MIN_SPLITS, min(most, power_of_two(WANTED_PROGRAMS // programs)))


def power_of_two(number: int) -> int:
    """Return the largest power of two up to the number; 1 below it."""
    return 1 << max(0, number.bit_length() - 1)


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
    return 128 if programs <= 64 else 256 if programs < 256 else 1024


class DecodeScratch:
    """Made once for a size, so that graphs keep the addresses; launches that follow one another on a stream may share
    it.
    """

    def __init__(
        self,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        max_keys: int = 0,
    ) -> None:
        """`max_keys`: those of the longest sequence."""
        parts = max((rows * num_splits(rows, num_kv_heads, max_keys) for rows in range(1, max_rows + 1)), default=0)
        self.out = torch.empty(parts * num_heads * head_dim, dtype=torch.float32, device=device)
        """[rows, K, splits, G, H]: weighted values of each split."""
        self.sums = torch.empty(2 * parts * num_heads, dtype=torch.float32, device=device)
        """[2, rows, K, splits, G]: running maximum, then sum."""
        self.arrived = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)
        """Splits that are done, per sequence and kv head; 0 between launches."""
