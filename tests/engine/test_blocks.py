"""The block pool adds up after any history, shares what is equal and never shares what is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker.engine.core.blocks import BlockManager, Copy
from testing.engine.audits import assert_sound


def test_an_owner_gets_blocks_for_all_its_tokens() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    assert blocks.admit("a", range(9)) == 0
    assert len(blocks.table("a")) == 3
    assert (blocks.num_free, blocks.num_cached, blocks.num_owned) == (1, 0, 3)


def test_too_few_blocks_change_nothing() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    blocks.admit("a", range(12))
    assert blocks.admit("b", range(100, 108)) is None
    assert not blocks.grow("a", 17)
    assert blocks.num_free == 1
    assert_sound(blocks.audit())


def test_a_computed_prefix_is_found_and_the_last_token_is_always_computed() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    blocks.admit("a", range(8))
    blocks.commit("a", range(8), 8)
    assert blocks.admit("b", range(8)) == 4
    assert blocks.admit("c", range(9)) == 8
    assert list(blocks.table("c"))[:2] == list(blocks.table("a"))
    assert blocks.num_owned == 4  # a: 2; b: one of its own; c: one of its own
    assert_sound(blocks.audit())


def test_what_is_not_computed_is_not_found() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    blocks.admit("a", range(8))
    blocks.commit("a", range(8), 7)
    assert blocks.admit("b", range(12)) == 4


def test_blocks_are_found_with_their_own_salt_alone() -> None:
    blocks = BlockManager(num_blocks=20, block_size=2, root=b"root")
    digests = set()
    for salt in SALTS:
        assert blocks.admit(salt, range(4), salt=salt) == 0
        blocks.commit(salt, range(4), 4)
        assert blocks.num_findable(range(5), salt) == 2
        assert [content.digest for _, content in blocks.contents(salt)] == [
            content.digest for content in blocks.digests_of(range(5), salt)
        ]
        digests |= {content.digest for content in blocks.digests_of(range(5), salt)}
    assert len(digests) == 2 * len(SALTS)
    assert blocks.num_findable(range(5), b"other") == 0
    assert_sound(blocks.audit())


def test_an_equal_block_after_a_different_prefix_is_not_found() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    blocks.admit("a", [1, 2, 7, 7])
    blocks.commit("a", [1, 2, 7, 7], 4)
    assert blocks.admit("b", [3, 4, 7, 7, 9]) == 0


class EqualHashes(int):
    """A token id whose hash equals every other's."""

    def __hash__(self) -> int:
        return 1


def test_prefixes_whose_hashes_collide_are_told_apart() -> None:
    blocks = BlockManager(num_blocks=16, block_size=2)
    first = [EqualHashes(token) for token in (1, 2, 7, 7)]
    second = [EqualHashes(token) for token in (3, 4, 7, 7)]
    for owner, tokens in (("a", first), ("b", second)):
        assert blocks.admit(owner, tokens) == 0
        blocks.commit(owner, tokens, 4)
    found = blocks.admit("c", [*second, EqualHashes(9)])
    assert found == 4
    assert list(blocks.table("c"))[:2] == list(blocks.table("b"))


def test_a_shared_block_whose_prefix_was_forgotten_can_be_found_again() -> None:
    blocks = BlockManager(num_blocks=10, block_size=2)
    blocks.admit("first", [0, 0])
    blocks.admit("long", [0, 0, 0, 0])
    blocks.commit("first", [0, 0], 2)
    blocks.fork("long", "child")
    blocks.commit("child", [0, 0, 0, 0], 4)  # its second block is registered below the block of "first"
    blocks.release("first", forget=True)
    blocks.commit("long", [0, 0, 0, 0], 4)
    assert_sound(blocks.audit())
    assert blocks.admit("late", [0, 0, 0, 0, 1]) == 4
    assert list(blocks.table("late"))[:2] == list(blocks.table("long"))


def test_cached_blocks_are_evicted_oldest_first_and_the_end_of_a_prefix_before_its_start() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    for owner, tokens in (("a", [1, 1, 2, 2]), ("b", [3, 3, 4, 4])):
        blocks.admit(owner, tokens)
        blocks.commit(owner, tokens, 4)
    blocks.release("a")
    blocks.release("b")
    assert (blocks.num_free, blocks.num_cached) == (0, 4)
    blocks.admit("c", [9])
    assert blocks.admit("d", [1, 1, 2, 2, 5]) == 2  # the block of 2, 2 was the oldest
    assert_sound(blocks.audit())


def test_two_that_computed_the_same_at_once_keep_their_own_blocks() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    for owner in "ab":
        assert blocks.admit(owner, [1, 1, 2, 2]) == 0
    for owner in "ab":
        blocks.commit(owner, [1, 1, 2, 2], 4)
    assert_sound(blocks.audit())
    blocks.release("a")
    blocks.release("b")
    assert (blocks.num_free, blocks.num_cached) == (6, 2)
    assert blocks.admit("c", [1, 1, 2, 2, 3]) == 4


def test_a_fork_shares_every_block_and_the_first_writer_copies_the_partial_one() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    blocks.admit("a", range(6))
    blocks.fork("a", "b")
    assert blocks.num_owned == 2
    partial = blocks.table("a")[1]
    assert blocks.is_shared("b", 6)
    copy = blocks.make_writable("b", 6)
    assert copy == Copy(partial, blocks.table("b")[1])
    assert copy.target != partial
    assert not blocks.is_shared("a", 6)
    assert_sound(blocks.audit())


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2, prefix_cache=False)
    blocks.admit("a", [1, 1, 2, 2])
    blocks.commit("a", [1, 1, 2, 2], 4)
    blocks.release("a")
    assert blocks.num_free == 4
    assert blocks.admit("b", [1, 1, 2, 2]) == 0


SALTS = (b"", b"a", b"b")


class AnyHistory(RuleBasedStateMachine):
    """Random operations against a model of the tokens, and of the salt, that each block must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(num_blocks=10, block_size=2)
        self.tokens: dict[int, list[int]] = {}
        self.salts: dict[int, bytes] = {}
        self.content: dict[tuple[int, int], tuple[bytes, ...]] = {}  # (block, offset) -> salt, all tokens up to there
        self.next_owner = 0

    def owners(self) -> st.SearchStrategy[int]:
        return st.sampled_from(sorted(self.tokens))

    def _write(self, owner: int, start: int) -> None:
        tokens = self.tokens[owner]
        for position in range(start, len(tokens)):
            block = self.blocks.table(owner)[position // 2]
            self.content[block, position % 2] = (self.salts[owner], bytes(tokens[: position + 1]))

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        keep_free=st.integers(0, 3),
        salt=st.sampled_from(SALTS),
    )
    def admit(self, tokens: list[int], keep_free: int, salt: bytes) -> None:
        before = self.blocks.num_available
        owner = self.next_owner
        findable = self.blocks.num_findable(tokens, salt)
        cached = self.blocks.admit(owner, tokens, keep_free=keep_free, salt=salt)
        if cached is None:
            assert self.blocks.num_available == before
            return
        assert cached == 2 * findable < len(tokens)
        assert self.blocks.num_available >= keep_free
        self.next_owner += 1
        self.tokens[owner], self.salts[owner] = tokens, salt
        self._write(owner, cached)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8), salt=st.sampled_from(SALTS))
    def follow(self, tokens: list[int], salt: bytes) -> None:
        """An owner that begins with what can be found, as for a hand-over."""
        owner = self.next_owner
        self.next_owner += 1
        found = self.blocks.follow(owner, tokens, len(tokens) // 2, salt)
        self.tokens[owner], self.salts[owner] = tokens[: 2 * found], salt

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def extend(self, data: st.DataObject, more: list[int]) -> None:
        owner = data.draw(self.owners())
        start = len(self.tokens[owner])
        shared = self.blocks.is_shared(owner, start)
        needed = self.blocks.blocks_for(start + len(more)) - len(self.blocks.table(owner)) + shared
        if needed > self.blocks.num_available:
            return
        if shared:
            source, target = self.blocks.make_writable(owner, start)
            self.content.update({(target, i): self.content[source, i] for i in range(2) if (source, i) in self.content})
        assert self.blocks.grow(owner, start + len(more))
        self.tokens[owner] = self.tokens[owner] + more
        self._write(owner, start)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        owner = data.draw(self.owners())
        self.blocks.commit(owner, self.tokens[owner], len(self.tokens[owner]))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        owner = data.draw(self.owners())
        self.blocks.fork(owner, self.next_owner)
        self.tokens[self.next_owner], self.salts[self.next_owner] = list(self.tokens[owner]), self.salts[owner]
        self.next_owner += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        owner = data.draw(self.owners())
        held = set(self.blocks.table(owner))
        del self.tokens[owner]
        freed = set(self.blocks.release(owner, forget=forget))
        shared = {block for other in self.tokens for block in self.blocks.table(other)}
        assert freed <= held - shared
        assert not forget or freed == held - shared, "nothing of it is kept for others to find"

    @invariant()
    def everything_adds_up(self) -> None:
        assert_sound(self.blocks.audit())

    @invariant()
    def every_owner_reads_its_own_tokens(self) -> None:
        for owner, tokens in self.tokens.items():
            for position in range(len(tokens)):
                block = self.blocks.table(owner)[position // 2]
                assert self.content[block, position % 2] == (self.salts[owner], bytes(tokens[: position + 1]))


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def damaged() -> BlockManager:
    """A pool with two owners that share the first of three blocks each, one cached block, five free ones."""
    blocks = BlockManager(11, 2)
    for owner in ("a", "gone"):
        blocks.admit(owner, [1, 2, 3, 4, ord(owner[0])])
        blocks.commit(owner, [1, 2, 3, 4, ord(owner[0])], 4)
    blocks.fork("a", "b")
    blocks.release("gone")
    assert_sound(blocks.audit())
    return blocks


def lose_a_free_block(blocks: BlockManager) -> None:
    blocks._free.pop()


def forget_a_table(blocks: BlockManager) -> None:
    del blocks._tables["a"], blocks._tables["b"]


def keep_a_reference(blocks: BlockManager) -> None:
    blocks._references[blocks.table("a")[0]] += 1


@pytest.mark.parametrize(
    ("harm", "num_leaked"),
    [
        pytest.param(lose_a_free_block, 1, id="a free block lost"),
        pytest.param(forget_a_table, 3, id="tables forgotten"),
        pytest.param(keep_a_reference, 1, id="a reference kept"),
    ],
)
def test_an_audit_finds_lost_blocks_and_gives_them_back(harm: Callable[[BlockManager], None], num_leaked: int) -> None:
    blocks = damaged()
    harm(blocks)
    audit = blocks.audit()
    assert (len(audit.leaked), audit.faults) == (num_leaked, ())
    blocks.repair(audit)
    assert_sound(blocks.audit())
    for owner in list(blocks._tables):
        blocks.release(owner)
    assert_sound(blocks.audit())
    assert blocks.num_owned == 0
    assert blocks.num_available == blocks.num_blocks


def free_an_owned_block(blocks: BlockManager) -> str:
    block = blocks.table("a")[0]
    blocks._free.append(block)
    return f"block {block} is owned and also free or cached"


def list_a_free_block_twice(blocks: BlockManager) -> str:
    blocks._free.append(blocks._free[0])
    return f"block {blocks._free[0]} is listed 2 times as free or cached"


def drop_a_reference(blocks: BlockManager) -> str:
    block = blocks.table("a")[2]
    blocks._references[block] -= 1
    return f"block {block} is in 2 tables with 1 references"


def miscount_owned_blocks(blocks: BlockManager) -> str:
    blocks._num_owned += 1
    return "3 blocks are owned, 4 were counted"


def find_a_free_block(blocks: BlockManager) -> str:
    blocks._free.append(blocks._cached.popitem()[0] if blocks._cached else next(iter(blocks._key_of)))
    return "a free block can be found"


@pytest.mark.parametrize(
    "harm",
    [free_an_owned_block, list_a_free_block_twice, drop_a_reference, miscount_owned_blocks, find_a_free_block],
    ids=lambda harm: harm.__name__,
)
def test_an_audit_names_what_cannot_be_repaired(harm: Callable[[BlockManager], str]) -> None:
    blocks = damaged()
    wanted = harm(blocks)
    assert wanted in blocks.audit().faults
