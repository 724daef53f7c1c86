"""A link to the host tier that is as late as it may be: nothing moves before a test, a fence or a wait makes it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.port import Move
from stoker.engine.transfer.ticket import LinkMeter, ThreadTicket, Ticket, TransferError


class LateLink:
    """Copies in the order of posting, at the last moment. What is not fenced reads or writes what it should not."""

    transport = "late"

    def __init__(self, blocks: np.ndarray, num_slots: int) -> None:
        """`blocks`: the cache, [blocks, block_bytes] uint8."""
        self.meter = LinkMeter()
        self.blocks = blocks
        self.slots = np.zeros((num_slots, blocks.shape[1]), dtype=np.uint8)
        self.posted: list[tuple[bool, Sequence[Move], _LateTicket]] = []
        self.fails: Callable[[], bool] = lambda: False
        self.num_fenced = 0

    lost = None

    def write(self, moves: Sequence[Move], tag: bytes) -> _LateTicket:
        return self._post(True, moves)

    def read(self, moves: Sequence[Move], tag: bytes) -> _LateTicket:
        return self._post(False, moves)

    def fence(self, ticket: Ticket) -> None:
        self.num_fenced += 1
        ticket.wait()

    def close(self) -> None:
        pass

    def advance(self) -> None:
        """Carry out the oldest transfer, if there is one."""
        if not self.posted:
            return
        writes, moves, ticket = self.posted.pop(0)
        if self.fails():
            ticket.complete(TransferError("the test's"))
            return
        for move in moves:
            block, slot = self.blocks[move.local], self.slots[move.remote]
            (slot if writes else block)[:] = block if writes else slot
            ticket.sums.append(int(raw_sums(block[None])[0]))
        ticket.complete()

    def damage(self, rng: random.Random) -> None:
        """Change one byte of a slot."""
        self.slots[rng.randrange(len(self.slots)), rng.randrange(self.slots.shape[1])] ^= 1 + rng.randrange(255)

    def _post(self, writes: bool, moves: Sequence[Move]) -> _LateTicket:
        ticket = _LateTicket(self, len(moves) * self.blocks.shape[1])
        self.posted.append((writes, moves, ticket))
        return ticket


class _LateTicket(ThreadTicket):
    def __init__(self, link: LateLink, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.link = link

    def wait(self, timeout_s: float | None = None) -> bool:
        while not self.done():
            self.link.advance()
        return True
