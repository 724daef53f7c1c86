"""A store as a device has it: copies happen when the next step begins, and their sums are known turns later."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from stoker.engine.core.handover.host_store import HostStore
from stoker.engine.transfer.intake import CopyAndSum, ReadySums
from stoker.engine.transfer.part_plan import PartPlan


class LateSums:
    """Sums that are computed late, and read later still."""

    def __init__(self, work: Callable[[], ReadySums]) -> None:
        self.work = work
        self.found: ReadySums | None = None
        self.read = False

    def done(self) -> bool:
        return self.read

    def values(self) -> Sequence[int]:
        assert self.found is not None, "read before its end"
        return self.found


class LateStore:
    """Blocks of a host store, moved at the last moment."""

    def __init__(self, host: HostStore, chance: random.Random) -> None:
        self.host, self.chance = host, chance
        self.posted: deque[LateSums] = deque()

    def copier(self, plan: PartPlan) -> CopyAndSum:
        copy = self.host.copier(plan)
        return lambda slots, blocks: self._post(lambda: ReadySums(copy(slots, blocks).values()))

    def sums(self, blocks: Sequence[Sequence[int]], plan: PartPlan) -> LateSums:
        return self._post(lambda: self.host.sums(blocks, plan))

    def _post(self, work: Callable[[], ReadySums]) -> LateSums:
        self.posted.append(LateSums(work))
        return self.posted[-1]

    def begin_step(self) -> None:
        """What is launched now comes after all that was posted."""
        for one in self.posted:
            if one.found is None:
                one.found = one.work()

    def pass_time(self) -> None:
        """Let some of what has happened be known, in order."""
        while self.posted and self.posted[0].found is not None and self.chance.random() < 0.6:
            self.posted.popleft().read = True
