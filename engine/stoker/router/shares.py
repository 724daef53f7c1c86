"""Shares of the traffic by revision: which revision a request belongs to. Pure.

A request belongs to a revision by a hash of its session, or of its body where it names none. So a session stays with
its revision, and when the share of the first revision rises, the requests that it has stay with it.

Made from a snapshot by `Backends`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from stoker.router.work import session_of

WHOLE = 100


@dataclass(frozen=True)
class Shares:
    """Percent of the traffic by revision, in the order of the snapshot; empty: every revision gets requests."""

    percents: tuple[tuple[str, int], ...] = ()

    def takes(self, revision: str) -> bool:
        """Whether the revision gets new requests."""
        return not self.percents or any(name == revision and percent for name, percent in self.percents)

    def order(self, key: bytes) -> tuple[str, ...]:
        """The revision of a request, then the others with a share, for when it has no backend."""
        open_ = [(name, percent) for name, percent in self.percents if percent]
        if not open_:
            return ()
        mine = _at(open_, place_of(key))
        return mine, *(name for name, _ in open_ if name != mine)


def place_of(key: bytes) -> float:
    """Where a key lies between 0 and 100, the same in every router."""
    return int.from_bytes(blake2b(key, digest_size=8).digest()) / 2**64 * WHOLE


def key_of(body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """What decides about the revision of a request: its session, else its body."""
    session = session_of(body, headers)
    return session or blake2b(body, digest_size=16).digest()


def _at(percents: list[tuple[str, int]], place: float) -> str:
    total = 0
    for name, percent in percents:
        total += percent
        if place < total:
            return name
    return percents[-1][0]
