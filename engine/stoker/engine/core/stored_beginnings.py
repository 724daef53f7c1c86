"""Which beginnings of prompts are in the store: routers name them, the engine looks in its listing of the store.

A router names the beginning of each prompt that it sends. It counts as stored while the last full block of that prompt
is, because a prompt's blocks are written from the first on. Only changes are announced, the newest `MOST_ANNOUNCED` of
them with each report, so a router that misses some takes a stored beginning for one that is not.

Called by the core, in its thread. Bounded: the names that were used last are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from stoker.engine.core.blocks import BlockContent, BlockManager
from stoker.engine.core.stats import SharedStoreStats
from stoker.engine.core.tier_costs import TierCosts
from stoker.pod.beginnings import MOST_ANNOUNCED

MOST_WATCHED = 1024
"""Names that are kept."""


class Listing(Protocol):
    """The part of the store that is asked."""

    @property
    def readable(self) -> bool: ...

    def lists(self, content: BlockContent) -> bool: ...


class StoredBeginnings:
    """The named beginnings of one engine."""

    def __init__(self, name: str, blocks: BlockManager, store: Listing, costs: TierCosts, block_bytes: int) -> None:
        """`name`: the same for all engines that can read each other's blocks in this store."""
        self.name, self.blocks, self.store, self.costs, self.block_bytes = name, blocks, store, costs, block_bytes
        self._watched: OrderedDict[str, BlockContent] = OrderedDict()
        """The last full block of the prompt by name, the least recently used first."""
        self._announced: OrderedDict[str, bool] = OrderedDict()
        """What was announced of each watched name, the newest last."""

    def watch(self, name: str, prompt: Sequence[int], salt: bytes = b"") -> None:
        """Follow the beginning of a prompt. An empty name, and a prompt without a full block, have no effect."""
        if name in self._watched:
            self._watched.move_to_end(name)
            return
        contents = self.blocks.digests_of(prompt, salt) if name else []
        if not contents:
            return
        self._watched[name] = contents[-1]
        if len(self._watched) > MOST_WATCHED:
            forgotten, _ = self._watched.popitem(last=False)
            self._announced.pop(forgotten, None)

    def look(self) -> None:
        """Compare all names with the listing of the store. While it cannot be read nothing is announced."""
        if not self.store.readable:
            return
        for name, content in self._watched.items():
            stored = self.store.lists(content)
            if stored != self._announced.get(name, False):
                self._announced[name] = stored
                self._announced.move_to_end(name)

    def stats(self) -> SharedStoreStats:
        """The store as routers see it."""
        self.look()
        newest = list(self._announced.items())[-MOST_ANNOUNCED:]
        return SharedStoreStats(
            self.name, self.blocks.block_size, self.block_bytes, self._block_s, self.store.readable, dict(newest)
        )

    @property
    def _block_s(self) -> float | None:
        """Seconds to bring a block from the store into the cache, as measured; None before."""
        fetched, loaded = self.costs.fetched.seconds(self.block_bytes), self.costs.reads.seconds(self.block_bytes)
        return None if fetched is None else fetched + (loaded or 0.0)
