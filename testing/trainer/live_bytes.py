"""The bytes of all tensors that live, and their peak: for tests of memory on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import sleep
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SAMPLED = 8
"""The peak is measured at each of that many operations that make a storage."""
STILL_READINGS = 20
READING_S = 0.01


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make inside of this context, from any thread that runs them.

    A storage counts until its last tensor dies, those that autograd holds included.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._made = count()
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = False
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                made = self._add(leaf.untyped_storage()) or made
        if made and next(self._made) % SAMPLED == 0:
            self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> bool:
        reference = StorageWeakRef(storage)
        known = self._storages.get(reference.cdata)
        if known is not None and not known[0].expired():
            return False
        self._storages[reference.cdata] = reference, storage.nbytes()
        return True

    @property
    def now(self) -> int:
        """Bytes that live now."""
        self._storages = {key: item for key, item in self._storages.items() if not item[0].expired()}
        return sum(size for _, size in self._storages.values())

    def settled(self) -> int:
        """Bytes that live when the threads of a communicator have let go of what they sent and received last.

        Gloo's thread wakes the waiter first and drops the tensors afterwards: read until nothing more is freed.
        """
        lowest, still = self.now, 0
        while still < STILL_READINGS:
            sleep(READING_S)
            now = self.now
            lowest, still = min(lowest, now), 0 if now < lowest else still + 1
        return lowest

    def restart_peak(self) -> int:
        """Begin a new peak; return the bytes that live now."""
        self.peak = self.now
        return self.peak
