"""What the stores behind the engines hold, by their announcements, in memory of fixed size.

A request that goes to an engine with a store carries a name for its beginning: the key of its last whole piece. When an
engine announces that name as stored, all pieces up to it count as stored; when it announces that it is gone, the last
piece does not count any more. A name that this router did not send, or has forgotten, says nothing to it.

No I/O. Owned by the policy `cacheAware`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from stoker.router.load import SharedStore
from stoker.router.prefix_index import PrefixIndex, Slots

MAX_SENT_PIECES = 1 << 18
"""Pieces of all names that are kept: 2 MiB."""
MAX_ENGINES = 4096


class StoredPrefixes:
    """Beginnings by the store that holds them."""

    def __init__(self, max_sent_pieces: int = MAX_SENT_PIECES) -> None:
        self.max_sent_pieces = max_sent_pieces
        self.slots = Slots()
        """Small numbers of stores."""
        self.index: PrefixIndex | None = None
        """None while no engine has a store."""
        self._sent: OrderedDict[str, array[int]] = OrderedDict()
        """Pieces of each name, the least recently sent first."""
        self.num_sent_pieces = 0
        self._seen: OrderedDict[tuple[str, str], Mapping[str, bool]] = OrderedDict()
        """The newest announcements of each engine, of names that are known here."""

    def sent(self, chain: Sequence[int]) -> None:
        """Remember the pieces of a beginning whose name a request carries."""
        if self.index is None or not chain:
            return
        name = name_of(chain)
        if name in self._sent:
            self._sent.move_to_end(name)
            return
        self._sent[name] = array("Q", chain)
        self.num_sent_pieces += len(chain)
        while self.num_sent_pieces > self.max_sent_pieces:
            self.num_sent_pieces -= len(self._sent.popitem(last=False)[1])

    def reported(self, engine: tuple[str, str], store: SharedStore) -> None:
        """Take what an engine announces."""
        if self.index is None:
            self.index = PrefixIndex()
        seen, taken = self._seen.get(engine, {}), dict[str, bool]()
        number = self.slots.number(store.name)
        self.slots.used(store.name)
        for name, is_there in store.announced.items():
            chain = self._sent.get(name)
            if chain is None:
                continue  # until this router sends it
            taken[name] = is_there
            if seen.get(name) == is_there:
                continue
            if is_there:
                self.index.add(chain, number)
            else:
                self.index.remove(chain[-1], number)
        self._seen[engine] = taken
        self._seen.move_to_end(engine)
        if len(self._seen) > MAX_ENGINES:
            self._seen.popitem(last=False)

    def depths(self, chain: Sequence[int]) -> dict[int, int]:
        """Number of leading pieces in each store, by its slot."""
        return self.index.depths(chain) if self.index is not None else {}


def name_of(chain: Sequence[int]) -> str:
    """The name of a beginning."""
    return f"{chain[-1]:016x}"
