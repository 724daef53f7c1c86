"""Letters that wait for a core, joined: neighbours that announce blocks of one request are read as one.

Each of them costs a launch and a look at its sums, so an engine that is behind catches up. Pure; called by `desk`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from stoker.engine.core.handover.messages import BlocksReady
from stoker.engine.core.handover.office import Letter


def joined(letters: Iterable[Letter]) -> Iterator[Letter]:
    """The letters in their order, neighbours from one peer about blocks of one dispatch as one."""
    for _, group in groupby(letters, _subject):
        first, *others = group
        if not others:
            yield first
            continue
        ready = [letter.message for letter in (first, *others) if isinstance(letter.message, BlocksReady)]
        yield Letter(first.peer, BlocksReady(ready[0].id, tuple(block for one in ready for block in one.blocks)))


def _subject(letter: Letter) -> object:
    """Equal for letters that can be joined."""
    return (letter.peer, letter.message.id) if isinstance(letter.message, BlocksReady) else object()
