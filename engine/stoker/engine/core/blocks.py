"""The pool of cache blocks: owners, sharing, and the prefix cache. Pure bookkeeping, no torch.

Each block is in exactly one place: free (no content), cached (without an owner, but its content can be found again; the
oldest is taken first) or owned (in the tables of one or more owners, reference-counted). A full block's content is
known by (content of the block before it, its own token ids): the index compares the ids themselves, so two prefixes
whose hashes collide are still told apart, and so are their continuations.

Contents of requests with a salt begin at that salt, so blocks are found only by requests with the same one.

With a `root`, every content also has a digest of all its tokens, by which the host tier (`host_tier`) knows it, and
cached blocks that are not saved there are kept in order.

Changed by the scheduler and the host tier alone; `build_step` reads the tables.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol

from stoker.engine.transfer.fingerprint import content_digest, salted_root

_ROOT = 0
"""Number of the content before the first block."""


class Copy(NamedTuple):
    """A block whose content must be copied before this step writes."""

    source: int
    target: int


class BlockContent(NamedTuple):
    """What a full block holds, whichever block it is."""

    digest: bytes
    """Of all tokens up to the block's end."""
    parent: bytes
    """Digest of the block before it; the root's for the first."""
    tokens: tuple[int, ...]
    """The block's own."""


class ContentLog(Protocol):
    """What follows the contents of blocks that can be found."""

    def stored(self, content: BlockContent) -> None:
        """One more block holds this content. The parent of a first block is the root, whatever its salt."""
        ...

    def removed(self, content: BlockContent) -> None:
        """One block less holds it."""
        ...


class _Content(NamedTuple):
    number: int
    """Identifies this content for ever. A block with the same tokens after an eviction gets a new number."""
    block: int


@dataclass(frozen=True)
class BlockAudit:
    """All blocks counted one by one, from the free list, the cache and the tables."""

    free: int
    cached: int
    owned: int
    total: int
    leaked: tuple[int, ...] = ()
    """Blocks in no list and no table, or with more references than tables. They can be given back (`repair`)."""
    faults: tuple[str, ...] = ()
    """Findings after which two sequences may write one block, or a prefix may lead to a wrong one. Answers may be
    wrong."""


_Parent = int | bytes
"""The number of the content before a block; before the first one `_ROOT`, or the request's salt."""
_ContentKey = tuple[_Parent, tuple[int, ...]]


@dataclass
class _Table:
    blocks: list[int] = field(default_factory=list)
    contents: list[int] = field(default_factory=list)
    """Content numbers of its leading full, computed blocks."""
    digests: list[bytes] = field(default_factory=list)
    """Their digests, where there is a root."""
    salt: bytes = b""
    """The owner's; empty without one."""


class BlockManager:
    """Block tables of all owners. An operation costs O(blocks it touches); one block is taken or given back in O(1)."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool = True, root: bytes | None = None) -> None:
        """`root`: the parent of first blocks, for digests of contents; None: no digests are kept."""
        self.root = root
        self._content_of: dict[int, BlockContent] = {}
        """By findable block, where there is a root."""
        self._unsaved: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that were not taken by `oldest_unsaved` yet."""
        self.log: ContentLog | None = None
        """Told of what blocks hold, where there is a root."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references = [0] * num_blocks
        self._num_owned = 0
        self._tables: dict[Hashable, _Table] = {}
        self._index: dict[_ContentKey, _Content] = {}
        self._key_of: dict[int, _ContentKey] = {}
        self._next_content = _ROOT + 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        """Blocks with owners, counted where blocks change hands and not derived from the other counts."""
        return self._num_owned

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now."""
        return self.num_free + self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def table(self, owner: Hashable) -> Sequence[int]:
        """The owner's blocks in order; valid until the owner's next change."""
        return self._tables[owner].blocks

    def admit(
        self,
        owner: Hashable,
        tokens: Sequence[int],
        *,
        read_cache: bool = True,
        keep_free: int = 0,
        salt: bytes = b"",
    ) -> int | None:
        """Give a new owner blocks for all of `tokens`, the longest known prefix with this salt from the cache.

        Returns how many leading tokens are already computed: whole blocks, and never the last token, whose logits are
        needed. None, with nothing changed, if it would leave fewer than `keep_free` blocks available.
        """
        assert owner not in self._tables, "an owner is admitted once"
        found = self._find(tokens, salt) if self.prefix_cache and read_cache else []
        num_new = self.blocks_for(len(tokens)) - len(found)
        num_idle = sum(self._references[content.block] == 0 for content in found)
        if self.num_available - num_idle - num_new < keep_free:
            return None
        for content in found:
            self._share(content.block)
        blocks = [content.block for content in found] + [self._take() for _ in range(num_new)]
        digests = [self._content_of[content.block].digest for content in found] if self.root is not None else []
        self._tables[owner] = _Table(blocks, [content.number for content in found], digests, salt)
        return len(found) * self.block_size

    def grow(self, owner: Hashable, num_tokens: int) -> bool:
        """Extend the owner's table to hold `num_tokens`. False, with nothing changed, if there are too few blocks."""
        blocks = self._tables[owner].blocks
        missing = self.blocks_for(num_tokens) - len(blocks)
        if missing > self.num_available:
            return False
        blocks.extend(self._take() for _ in range(missing))
        return True

    def follow(self, owner: Hashable, tokens: Sequence[int], most: int, salt: bytes = b"") -> int:
        """Extend a table of full, computed blocks by those of `tokens` that can be found behind it, up to `most`.

        A new owner begins with an empty table and this salt. Returns the number of its blocks.
        """
        table = self._tables.setdefault(owner, _Table(salt=salt))
        while len(table.blocks) < most and len(table.contents) == len(table.blocks):
            start = len(table.blocks) * self.block_size
            content = self._index.get((self._last(table), tuple(tokens[start : start + self.block_size])))
            if content is None:
                break
            self._share(content.block)
            table.blocks.append(content.block)
            table.contents.append(content.number)
            if self.root is not None:
                table.digests.append(self._content_of[content.block].digest)
        return len(table.blocks)

    def num_committed(self, owner: Hashable) -> int:
        """Leading full blocks of the owner whose steps have ended."""
        return len(self._tables[owner].contents)

    def owns(self, owner: Hashable) -> bool:
        return owner in self._tables

    def is_shared(self, owner: Hashable, position: int) -> bool:
        """Whether another owner would see a write at this token position."""
        blocks = self._tables[owner].blocks
        index = position // self.block_size
        return index < len(blocks) and self._references[blocks[index]] > 1

    def make_writable(self, owner: Hashable, position: int) -> Copy:
        """Replace the shared block at `position` by a copy of its own. Needs one available block."""
        blocks = self._tables[owner].blocks
        index = position // self.block_size
        source, target = blocks[index], self._take()
        blocks[index] = target
        self._references[source] -= 1
        assert self._references[source] > 0, "a block that is not shared needs no copy"
        return Copy(source, target)

    def fork(self, owner: Hashable, child: Hashable) -> None:
        """Give `child` the same blocks. An owner must copy a shared block before it writes (`make_writable`)."""
        assert child not in self._tables, "an owner is admitted once"
        table = self._tables[owner]
        for block in table.blocks:
            self._references[block] += 1
        self._tables[child] = _Table(list(table.blocks), list(table.contents), list(table.digests), table.salt)

    def completes_block(self, start: int, end: int) -> bool:
        """Whether computing the tokens [start, end) can make a block findable."""
        return self.prefix_cache and start // self.block_size != end // self.block_size

    def commit(self, owner: Hashable, tokens: Sequence[int], num_computed: int) -> None:
        """Make full blocks findable whose `num_computed` leading tokens have been computed."""
        if not self.prefix_cache:
            return
        table = self._tables[owner]
        while (len(table.contents) + 1) * self.block_size <= num_computed:
            index = len(table.contents)
            own_tokens = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
            number = self._register(table.blocks[index], (self._last(table), own_tokens))
            table.contents.append(number)
            if self.root is not None:
                self._note_digest(table, index, own_tokens, self.root)

    def release(self, owner: Hashable, *, forget: bool = False) -> list[int]:
        """Take the owner's blocks back and return those that are free now. The end of a prefix is evicted first.

        `forget`: their content is worthless, so blocks without another owner become free, not cached.
        """
        freed: list[int] = []
        for block in reversed(self._tables.pop(owner).blocks):
            self._references[block] -= 1
            if self._references[block] > 0:
                continue
            self._num_owned -= 1
            if forget:
                self._forget(block)
            if block in self._key_of:
                self._cached[block] = None
                if self.root is not None:
                    self._unsaved[block] = None
            else:
                freed.append(block)
        self._free.extend(freed)
        return freed

    # For the host tier.

    @property
    def num_clean(self) -> int:
        """Blocks that can be taken without losing a content that is nowhere else, as far as is known."""
        return self.num_available - len(self._unsaved)

    def oldest_unsaved(self, most: int) -> list[tuple[int, BlockContent]]:
        """Take up to `most` cached blocks out of the list of unsaved ones, those first that would be evicted first."""
        blocks = [self._unsaved.popitem(last=False)[0] for _ in range(min(most, len(self._unsaved)))]
        return [(block, self._content_of[block]) for block in blocks]

    def contents(self, owner: Hashable) -> list[tuple[int, BlockContent]]:
        """The owner's full, computed blocks that can be found, with what they hold."""
        blocks = self._tables[owner].blocks
        return [(block, self._content_of[block]) for block in blocks if block in self._content_of]

    def all_contents(self) -> Iterator[BlockContent]:
        """Yield what each block holds that can be found, where there is a root."""
        yield from self._content_of.values()

    def num_findable(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Leading blocks of `tokens` that `admit` would find now."""
        return len(self._find(tokens, salt))

    def digests_of(self, tokens: Sequence[int], salt: bytes = b"") -> list[BlockContent]:
        """The contents of all full blocks of `tokens` but the one with the last token, cached or not."""
        assert self.root is not None, "digests are kept"
        contents: list[BlockContent] = []
        parent = salted_root(self.root, salt)
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            own_tokens = tuple(tokens[start : start + self.block_size])
            contents.append(BlockContent(content_digest(parent, own_tokens), parent, own_tokens))
            parent = contents[-1].digest
        return contents

    def audit(self) -> BlockAudit:
        """Count every block anew and compare with what is kept. Costs O(all blocks)."""
        counts = Counter(chain.from_iterable(table.blocks for table in self._tables.values()))
        leaked, faults = ((), ()) if self._adds_up(counts) else self._findings(counts)
        return BlockAudit(
            len(self._free), len(self._cached), len(counts), self.num_blocks, leaked, (*faults, *self._index_faults())
        )

    def _adds_up(self, counts: Counter[int]) -> bool:
        """Whether each block is free, cached or owned, exactly once, and references equal the tables."""
        num_listed = len(self._free) + len(self._cached) + len(counts)
        return (
            num_listed == self.num_blocks == len({*self._free, *self._cached, *counts})
            and self._num_owned == len(counts)
            and sum(self._references) == counts.total()
            and all(self._references[block] == count for block, count in counts.items())
        )

    def _findings(self, counts: Counter[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Leaked blocks, and faults that cannot be repaired, block by block."""
        listed = Counter(chain(self._free, self._cached))
        leaked, faults = [], []
        for block, references in enumerate(self._references):
            owned, times = counts[block], listed[block]
            if references > owned or not owned + times:
                leaked.append(block)
            if times > 1:
                faults.append(f"block {block} is listed {times} times as free or cached")
            if owned and times:
                faults.append(f"block {block} is owned and also free or cached")
            if references < owned:
                faults.append(f"block {block} is in {owned} tables with {references} references")
        if not leaked and not faults:
            faults.append(f"{len(counts)} blocks are owned, {self._num_owned} were counted")
        return tuple(leaked), tuple(faults)

    def repair(self, audit: BlockAudit) -> list[int]:
        """Give leaked blocks back and return those that are free now; their content is meaningless."""
        counts = Counter(block for table in self._tables.values() for block in table.blocks)
        lost = [block for block in audit.leaked if not counts[block] and block not in self._cached]
        for block in audit.leaked:
            self._references[block] = counts[block]
        for block in lost:
            self._forget(block)
        self._free.extend(lost)
        self._num_owned = len(counts)
        return lost

    def _index_faults(self) -> Iterator[str]:
        if self._key_of != {content.block: key for key, content in self._index.items()}:
            yield "the prefix index and its inverse differ"
        if not set(self._cached) <= self._key_of.keys():
            yield "a cached block cannot be found"
        if not self._key_of.keys().isdisjoint(self._free):
            yield "a free block can be found"
        if self.root is not None and self._content_of.keys() != self._key_of.keys():
            yield "a block that can be found has no digest, or one that cannot has one"
        if not self._unsaved.keys() <= self._cached.keys():
            yield "an unsaved block is not cached"

    def _find(self, tokens: Sequence[int], salt: bytes) -> list[_Content]:
        found: list[_Content] = []
        parent: _Parent = salt or _ROOT
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            content = self._index.get((parent, tuple(tokens[start : start + self.block_size])))
            if content is None:
                break
            found.append(content)
            parent = content.number
        return found

    @staticmethod
    def _last(table: _Table) -> _Parent:
        return table.contents[-1] if table.contents else table.salt or _ROOT

    def _register(self, block: int, key: _ContentKey) -> int:
        known = self._index.get(key)
        if known is not None:
            return known.number  # two sequences computed the same tokens: this copy stays private
        if block in self._key_of:
            # A sharer registered it below a prefix that was forgotten since: same content, found through `key` again.
            content = self._index.pop(self._key_of[block])
        else:
            content = _Content(self._next_content, block)
            self._next_content += 1
        self._index[key] = content
        self._key_of[block] = key
        return content.number

    def _note_digest(self, table: _Table, index: int, tokens: tuple[int, ...], root: bytes) -> None:
        parent = table.digests[-1] if table.digests else salted_root(root, table.salt)
        table.digests.append(content_digest(parent, tokens))
        block = table.blocks[index]
        if block in self._key_of:
            if self.log is not None and block not in self._content_of:
                self.log.stored(BlockContent(table.digests[-1], parent if index else root, tokens))
            self._content_of[block] = BlockContent(table.digests[-1], parent, tokens)

    def _share(self, block: int) -> None:
        if self._references[block] == 0:
            del self._cached[block]
            self._unsaved.pop(block, None)
            self._num_owned += 1
        self._references[block] += 1

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        self._num_owned += 1
        return block

    def _forget(self, block: int) -> None:
        """Remove the block from the prefix index, if it is in it."""
        if block in self._key_of:
            del self._index[self._key_of.pop(block)]
            content = self._content_of.pop(block, None)
            if self.log is not None and content is not None:
                self.log.removed(content)
            self._unsaved.pop(block, None)
