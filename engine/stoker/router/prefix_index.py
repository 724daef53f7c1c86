"""The beginnings of requests that each backend has computed, in a table of fixed size.

A request's prompt is cut into pieces of 1,024 bytes; the key of a piece stands for all bytes up to its end. The table
maps a key to the last four backends that got a request with this beginning. It is an estimate: a router knows what it
sent, not what an engine's cache still holds. A backend that restarts has another epoch and so begins without any.

No I/O. Owned by the policy `cacheAware`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

PIECE_BYTES = 1024
MAX_PIECES = 256
"""Of a longer prompt only so many pieces are compared: 256 KiB."""
WAYS = 4
"""Places that a key may have."""
_SLOT_BITS = 16
_SLOTS = (1 << 4 * _SLOT_BITS) - 1
_SLOT = (1 << _SLOT_BITS) - 1
_KEY = (1 << 64) - 1


def chain_of(prompt: bytes | memoryview, salt: bytes = b"") -> tuple[int, ...]:
    """Keys of a prompt's whole pieces; equal for equal beginnings and salts. They hold for one process: the hash is
    keyed."""
    keys, before = [], hash(salt) & _KEY if salt else 0
    for begin in range(0, min(len(prompt) - PIECE_BYTES, (MAX_PIECES - 1) * PIECE_BYTES) + 1, PIECE_BYTES):
        before = hash((before, bytes(prompt[begin : begin + PIECE_BYTES]))) & _KEY
        keys.append(before or 1)
    return tuple(keys)


class Slots:
    """Small numbers for backends, from 1; one that is not used for long gives its number to another."""

    def __init__(self, limit: int = _SLOT) -> None:
        self._limit = limit
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()

    def number(self, backend: Hashable) -> int:
        """The number of a backend, by pod uid and epoch."""
        number = self._numbers.get(backend)
        if number is None:
            full = len(self._numbers) >= self._limit
            number = self._numbers.popitem(last=False)[1] if full else len(self._numbers) + 1
            self._numbers[backend] = number
        return number

    def numbers(self, backends: Iterable[Hashable]) -> list[int]:
        """The numbers of backends; 0 for one that has none, which gets none by it."""
        get = self._numbers.get
        return [get(backend, 0) for backend in backends]

    def used(self, backend: Hashable) -> None:
        """Note that a backend got a request."""
        self._numbers.move_to_end(backend)


class PrefixIndex:
    """A set-associative table: `size` keys of 16 bytes, whatever is added."""

    def __init__(self, size: int = 1 << 18) -> None:
        self.size = size
        self._sets = size // WAYS
        self._keys = array("Q", bytes(8 * size))
        self._slots = array("Q", bytes(8 * size))
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that the table takes; they never change."""
        return self._keys.itemsize * len(self._keys) + self._slots.itemsize * len(self._slots)

    def add(self, chain: Sequence[int], slot: int) -> None:
        """Note that a backend gets a request with this beginning."""
        for key in chain:
            place = self._place(key)
            if place is not None and self._slots[place] & _SLOT == slot:
                continue
            if place is None:
                place = self._free_place(key)
                self._keys[place], self._slots[place] = key, slot
            else:
                self._slots[place] = _with(self._slots[place], slot)

    def remove(self, key: int, slot: int) -> None:
        """Note that a backend lost the piece of a key. Harmless where it had none."""
        place = self._place(key)
        if place is None:
            return
        packed, kept, shift = self._slots[place], 0, 0
        while packed:
            if packed & _SLOT != slot:
                kept |= (packed & _SLOT) << shift
                shift += _SLOT_BITS
            packed >>= _SLOT_BITS
        self._slots[place] = kept

    def depths(self, chain: Sequence[int]) -> dict[int, int]:
        """Number of leading pieces that each backend has had; backends without the first one are left out."""
        depths: dict[int, int] = {}
        for depth, key in enumerate(chain, 1):
            place = self._place(key)
            packed = self._slots[place] if place is not None else 0
            met = False
            while packed:
                slot = packed & _SLOT
                packed >>= _SLOT_BITS
                if depths.get(slot, 0) == depth - 1:
                    depths[slot], met = depth, True
            if not met:
                break
        return depths

    def _free_place(self, key: int) -> int:
        """An empty place of a key, or one of another key in turn."""
        first = key % self._sets * WAYS
        for place in range(first, first + WAYS):
            if not self._keys[place]:
                return place
        self._turn += 1
        return first + self._turn % WAYS

    def _place(self, key: int) -> int | None:
        keys, first = self._keys, key % self._sets * WAYS
        if keys[first] == key:
            return first
        for place in range(first + 1, first + WAYS):
            if keys[place] == key:
                return place
        return None


def _with(packed: int, slot: int) -> int:
    """The last four backends with `slot` as the newest."""
    kept, shift, rest = slot, _SLOT_BITS, packed
    while rest and shift < 4 * _SLOT_BITS:
        one = rest & _SLOT
        rest >>= _SLOT_BITS
        if one != slot:
            kept |= one << shift
            shift += _SLOT_BITS
    return kept & _SLOTS
