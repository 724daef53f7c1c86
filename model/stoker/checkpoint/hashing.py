"""blake3 hashes of buffers. A few threads hash a large buffer, which keeps up with a fast disk without taking the
machine.

Pure. Called by the writer for each piece, and by reader and verification to compare.
"""

from __future__ import annotations

import os

from blake3 import blake3

PARALLEL_BYTES = 2**20
"""Buffers of this size and more are hashed by several threads."""
MAX_THREADS = 4


def hash_bytes(data: memoryview) -> str:
    """Return the hex digest of a buffer."""
    hasher = new_hasher(len(data))
    hasher.update(data)
    return hasher.hexdigest()


def new_hasher(size: int) -> blake3:
    """A hasher for a buffer, or a run of large chunks, of `size` bytes."""
    return blake3(max_threads=hash_threads() if size >= PARALLEL_BYTES else 1)


def hash_threads() -> int:
    return max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
