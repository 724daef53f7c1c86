"""Room in a decode engine's cache for requests whose prompts others compute, beside the sequences that run."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import sub

from stoker.engine.core.handover.decode_side import Split
from stoker.engine.core.scheduler import Scheduler

RESERVE_BLOCKS = 1
"""Promised to a request beyond its prompt."""


class CacheRoom:
    """Questions about the free blocks. It reserves nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._blocks = scheduler, scheduler.blocks

    def takes_more(self, promised: Iterable[Split]) -> bool:
        """Whether the cache has room for all that is promised, beside what runs and what waits.

        Prompts that wait for their turn alone are no reason to compute one more here.
        """
        room = self._blocks.num_available - len(self._scheduler.running)
        room -= sum(self._missing(one) for one in promised)
        queued = (self._blocks.blocks_for(len(sequence.tokens)) for sequence in self._scheduler.waiting)
        return all(left >= 0 for left in accumulate(queued, sub, initial=room))

    def _missing(self, split: Split) -> int:
        """Blocks that were promised to it and not taken yet."""
        return max(split.num_blocks + RESERVE_BLOCKS - len(self._blocks.table(split)), 0)

    def goes_on(self, split: Split) -> bool:
        """Whether this engine would go on with the request at once."""
        rest = self._blocks.blocks_for(len(split.request.prompt_tokens) + 1) - split.num_blocks
        rest += sum(self._blocks.blocks_for(len(one.tokens)) for one in split.outputs if not one.ended)
        return self._scheduler.takes_more and self._blocks.num_available >= rest + len(self._scheduler.running)
