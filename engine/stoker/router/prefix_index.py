"""The beginnings of requests that each backend has computed, in a table of fixed size.

A request's prompt is cut into pieces of 1,024 bytes; the key of a piece stands for all bytes up to its end. The table
maps a key to the last four backends that got a request with this beginning. It is an estimate: a router knows what it
sent, not what an engine's cache still holds. A backend that restarts has another epoch and so begins without any.

No I/O. Owned by the policy `cacheAware`.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence

PIECE_BYTES = 1024
MAX_PIECES = 256
"""Of a longer prompt only so many pieces are compared: 256 KiB."""
WAYS = 4
"""Places that a key may have."""
_SLOT_BITS = 16
_SLOTS = (1 << 4 * _SLOT_BITS) - 1
_SLOT = (1 << _SLOT_BITS) - 1
_KEY = (1 << 64) - 1


def chain_of(body: bytes, begin: int = 0, salt: bytes = b"") -> tuple[int, ...]:
    """Keys of the whole pieces of a prompt that begins in a body; equal for equal beginnings and salts. They hold for
    one process: the hash is keyed."""
    keys, before = [], hash(salt) & _KEY if salt else 0
    for at in range(begin, min(len(body) - PIECE_BYTES, begin + (MAX_PIECES - 1) * PIECE_BYTES) + 1, PIECE_BYTES):
        before = hash((before, body[at : at + PIECE_BYTES])) & _KEY
        keys.append(before or 1)
    return tuple(keys)


class Slots:
    """Small numbers for backends, from 1; one that is not used for long gives its number to another."""

    def __init__(self, limit: int = _SLOT) -> None:
        self._limit = limit
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._backends: dict[int, Hashable] = {}
        """By number."""

    def number(self, backend: Hashable) -> int:
        """The number of a backend, by pod uid and epoch."""
        number = self._numbers.get(backend)
        if number is None:
            full = len(self._numbers) >= self._limit
            number = self._numbers.popitem(last=False)[1] if full else len(self._numbers) + 1
            self._numbers[backend] = number
            self._backends[number] = backend
        return number

    def named(self, values: Mapping[int, int]) -> dict[Hashable, int]:
        """Return values by backend instead of by its number; those of no backend are left out."""
        get = self._backends.get
        return {backend: value for number, value in values.items() if (backend := get(number)) is not None}

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
        keys, slots, sets = self._keys, self._slots, self._sets
        for key in chain:
            first = key % sets * WAYS
            place = first if keys[first] == key else self._place(key)
            if place is not None and slots[place] & _SLOT == slot:
                continue
            if place is None:
                place = self._free_place(key)
                keys[place], slots[place] = key, slot
            else:
                slots[place] = _with(slots[place], slot)

    def remove(self, key: int, slot: int) -> None:
        """Note that a backend lost the piece of a key. Harmless where it had none."""
        place = self._place(key)
        if place is None:
            return
        kept = [one for one in _unpacked(self._slots[place]) if one != slot]
        self._slots[place] = sum(one << at * _SLOT_BITS for at, one in enumerate(kept))

    def depths(self, chain: Sequence[int]) -> dict[int, int]:
        """Number of leading pieces that each backend has had; backends without the first one are left out."""
        keys, slots, sets, last = self._keys, self._slots, self._sets, -1
        depths: dict[int, int] = {}
        deepest: list[int] = []
        """Those that have had all pieces so far."""
        for before, key in enumerate(chain):
            first = key % sets * WAYS
            place = first if keys[first] == key else self._place(key)
            packed = slots[place] if place is not None else 0
            if packed == last:
                continue  # as a rule, all pieces of a beginning were at the same backends
            met = _unpacked(packed)
            depths |= {slot: before for slot in deepest if slot not in met}
            deepest = [slot for slot in met if not before or slot in deepest]
            if not deepest:
                return depths
            last = packed
        return depths | dict.fromkeys(deepest, len(chain))

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


def _unpacked(packed: int) -> list[int]:
    slots = []
    while packed:
        slots.append(packed & _SLOT)
        packed >>= _SLOT_BITS
    return slots


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
