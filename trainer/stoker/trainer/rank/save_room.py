"""Room for a save on its volume: what it needs and what was free, for the message of one that did not fit.

Nothing is refused beforehand: many network file systems do not tell what is free, or tell 0.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.checkpoint.bucket_storage import is_bucket_path
from stoker.checkpoint.dtype import item_bytes
from stoker.checkpoint.manifest import TensorInfo

FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(folder: Path) -> int | None:
    """Return what the volume of a folder has left for this user; None for a bucket, or where it does not tell."""
    if is_bucket_path(folder):
        return None
    with suppress(OSError):
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize
    return None


def save_bytes(tensors: Sequence[TensorInfo]) -> int:
    """Return the bytes of all tensors, each written once; files that travel along are left out."""
    return sum(math.prod(tensor.shape) * item_bytes(tensor.dtype) for tensor in tensors)


class SaveRoom:
    """Measured when a save begins, before any rank writes."""

    def __init__(
        self, root: Path, tensors: Sequence[TensorInfo], free: Callable[[Path], int | None] = free_bytes
    ) -> None:
        self._root = root
        self._needed = save_bytes(tensors)
        self._free = free(root)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Add folder, needed and free bytes to the error of a full volume or quota."""
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            free = "" if self._free is None else f", {self._free:,} were free when it began"
            text = f"{error.strerror}: a save needs {self._needed:,} bytes in {self._root}{free}"
            raise OSError(error.errno, text, error.filename) from error
