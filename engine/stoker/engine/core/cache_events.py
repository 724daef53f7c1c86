"""What the prefix cache holds, as events for subscribers: blocks stored, blocks removed, all cleared.

A subscriber that applies the events in order knows the contents of all blocks that can be found. Two blocks may hold
the same tokens; their content is stored with the first and removed with the last. The encoding is that of vLLM's KV
events: msgpack arrays whose first item is the event's name.

Pure. Changed by `BlockManager`; `CacheEventPublisher` sends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from stoker.engine.core.blocks import BlockContent


def event_hash(digest: bytes) -> int:
    """The number by which events name a content: the last 64 bits of its digest."""
    return int.from_bytes(digest[-8:], "big")


@dataclass
class BlockStored:
    """Consecutive full blocks of one sequence."""

    hashes: list[int]
    parent: int | None
    """Of the block before the first; None at the beginning of a prompt."""
    tokens: list[int]
    """Of all blocks, one after the other."""
    block_size: int

    def to_wire(self, medium: str) -> list[Any]:
        """[name, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name]"""
        return ["BlockStored", self.hashes, self.parent, self.tokens, self.block_size, None, medium, None]


@dataclass
class BlockRemoved:
    """Contents that can be found no more."""

    hashes: list[int]

    def to_wire(self, medium: str) -> list[Any]:
        """[name, block_hashes, medium]"""
        return ["BlockRemoved", self.hashes, medium]


@dataclass
class AllBlocksCleared:
    """Nothing can be found: sent when an engine starts."""

    def to_wire(self, _: str) -> list[Any]:
        """[name]"""
        return ["AllBlocksCleared"]


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass
class CacheEventLog:
    """Events since the last `take`."""

    block_size: int
    root: bytes
    """Digest that stands before first blocks."""
    _events: list[CacheEvent] = field(default_factory=lambda: [AllBlocksCleared()])
    _blocks: Counter[bytes] = field(default_factory=Counter)
    """Number of blocks by the digest of what they hold."""
    _last: bytes = b""
    """Digest of the last stored block, while the newest event is a `BlockStored`."""

    def stored(self, content: BlockContent) -> None:
        """Note that one more block holds this content."""
        self._blocks[content.digest] += 1
        if self._blocks[content.digest] > 1:
            return
        newest = self._events[-1] if self._events else None
        if isinstance(newest, BlockStored) and self._last == content.parent:
            newest.hashes.append(event_hash(content.digest))
            newest.tokens.extend(content.tokens)
        else:
            parent = event_hash(content.parent) if content.parent != self.root else None
            self._events.append(
                BlockStored([event_hash(content.digest)], parent, list(content.tokens), self.block_size)
            )
        self._last = content.digest

    def removed(self, content: BlockContent) -> None:
        """Note that one block less holds this content."""
        self._blocks[content.digest] -= 1
        if self._blocks[content.digest]:
            return
        del self._blocks[content.digest]
        newest = self._events[-1] if self._events else None
        if isinstance(newest, BlockRemoved):
            newest.hashes.append(event_hash(content.digest))
        else:
            self._events.append(BlockRemoved([event_hash(content.digest)]))

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def encode_batch(events: Sequence[CacheEvent], unix_s: float, medium: str, rank: int) -> bytes:
    """Encode one batch: [ts, events, data_parallel_rank]."""
    packed: bytes = msgpack.packb([unix_s, [event.to_wire(medium) for event in events], rank])
    return packed
