"""Announcements that wait are read as one, and nothing else changes: no letter is lost, doubled or overtaken."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.core.handover.joined_letters import joined
from stoker.engine.core.handover.messages import BlocksReady, Commit, ReadyBlock
from stoker.engine.core.handover.office import Letter

PEERS, NAMES = st.sampled_from(["a", "b"]), st.sampled_from(["x", "y"])
BLOCKS = st.lists(st.integers(0, 99), max_size=3).map(lambda places: tuple(ReadyBlock(one, 0, 1, 2) for one in places))
LETTERS = st.lists(st.builds(Letter, PEERS, st.builds(BlocksReady, NAMES, BLOCKS) | st.builds(Commit, NAMES)))


def apart(letters: list[Letter]) -> list[tuple[str, str, object]]:
    """Block by block: (peer, dispatch, block or message)."""
    return [
        (peer, message.id, part)  # type: ignore[union-attr]
        for peer, message in letters
        for part in (message.blocks if isinstance(message, BlocksReady) else (message,))
    ]


@given(LETTERS)
def test_letters_keep_their_order_and_neighbours_are_one(letters: list[Letter]) -> None:
    found = list(joined(letters))
    assert apart(found) == apart(letters)
    for one, two in pairwise(found):
        both = isinstance(one.message, BlocksReady) and isinstance(two.message, BlocksReady)
        assert not (both and (one.peer, one.message.id) == (two.peer, two.message.id))  # type: ignore[union-attr]
