"""The link to the host tier: blocks of one rank's cache to and from slots of main memory.

Transfers run beside steps and in the order in which they were posted. On a CPU a thread copies. On a GPU a stream of
its own does, to and from pinned memory: it begins behind what was launched before, and `fence` lets the compute stream
wait for it. Sums are those of the cache's blocks, on both ways.

Made by `core.build`, called by `core.host_tier` in the core's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.engine.transfer.checksum import raw_sums
from stoker.engine.transfer.checksum_kernel import sums, torch_sums
from stoker.engine.transfer.port import Move
from stoker.engine.transfer.staged_rows import StagedRows
from stoker.engine.transfer.ticket import LinkMeter, SummedTicket, ThreadTicket, Ticket, TransferError
from stoker.model.paged_attend import KVCache, zero_pages


def host_link(cache: KVCache, num_slots: int, *, fused: bool) -> HostMemoryLink | PinnedMemoryLink:
    """The link for a cache. `fused`: sum blocks of a GPU by the kernel."""
    blocks_BN = cache.data.view(cache.num_blocks, -1).view(torch.uint8)
    if blocks_BN.device.type == "cpu":
        return HostMemoryLink(blocks_BN.numpy(), num_slots)
    return PinnedMemoryLink(blocks_BN, num_slots, fused=fused)


class HostMemoryLink:
    """Copies between a cache and slots in the same memory, in a thread."""

    transport = "host-memory"

    def __init__(self, blocks_BN: np.ndarray, num_slots: int) -> None:
        self.meter = LinkMeter()
        self.blocks = blocks_BN
        self.slots = zero_pages((num_slots, blocks_BN.shape[1]), torch.uint8).numpy()
        self._queue: queue.SimpleQueue[tuple[bool, Sequence[Move], ThreadTicket] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="host tier", daemon=True)
        self._thread.start()

    @property
    def memory(self) -> np.ndarray:
        """The slots, [slots, block_bytes] uint8."""
        return self.slots

    @property
    def lost(self) -> str | None:
        return None if self._thread.is_alive() else "the link is closed"

    def write(self, moves: Sequence[Move], tag: bytes) -> SummedTicket:  # noqa: ARG002 - no peer gets it
        return self._post(True, moves)

    def read(self, moves: Sequence[Move], tag: bytes) -> SummedTicket:  # noqa: ARG002 - no peer gets it
        return self._post(False, moves)

    def fence(self, ticket: Ticket) -> None:
        ticket.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _post(self, writes: bool, moves: Sequence[Move]) -> SummedTicket:
        ticket = ThreadTicket(len(moves) * self.blocks.shape[1])
        if self.lost is not None:
            ticket.complete(TransferError(self.lost))
        self._queue.put((writes, moves, ticket))
        return ticket

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            writes, moves, ticket = item
            if not ticket.start():
                continue
            try:
                ticket.sums = [self._copy(writes, move) for move in moves]
            except (IndexError, ValueError) as error:
                ticket.complete(TransferError(str(error)))
                continue
            ticket.complete()
            self.meter.record(ticket.bytes, ticket.seconds)

    def _copy(self, writes: bool, move: Move) -> int:
        block, slot = self.blocks[move.local], self.slots[move.remote]
        if writes:
            slot[:] = block
        else:
            block[:] = slot
        return int(raw_sums(block[None])[0])


class PinnedMemoryLink:
    """Copies between a GPU's cache and pinned memory, on a stream."""

    transport = "pinned-memory"

    def __init__(self, blocks_BN: Tensor, num_slots: int, *, fused: bool) -> None:
        self.meter = LinkMeter()
        self.blocks = blocks_BN
        self.slots = torch.empty(num_slots, blocks_BN.shape[1], dtype=torch.uint8, pin_memory=True)
        self._sums = sums if fused else torch_sums
        self._stream = torch.cuda.Stream(blocks_BN.device)  # type: ignore[no-untyped-call]
        self._closed = False
        self._sum_of([0])  # compiles the kernel

    @property
    def memory(self) -> np.ndarray:
        """The slots, [slots, block_bytes] uint8: the same pinned memory."""
        return self.slots.numpy()

    @property
    def lost(self) -> str | None:
        return "the link is closed" if self._closed else None

    def write(self, moves: Sequence[Move], tag: bytes) -> SummedTicket:  # noqa: ARG002 - no peer gets it
        return self._post(True, moves)

    def read(self, moves: Sequence[Move], tag: bytes) -> SummedTicket:  # noqa: ARG002 - no peer gets it
        return self._post(False, moves)

    def fence(self, ticket: Ticket) -> None:
        assert isinstance(ticket, StreamTicket), "a ticket of this link"
        torch.cuda.current_stream(self.blocks.device).wait_event(ticket.end)

    def close(self) -> None:
        self._closed = True
        self._stream.synchronize()

    @torch.inference_mode()
    def _post(self, writes: bool, moves: Sequence[Move]) -> SummedTicket:
        self._stream.wait_stream(torch.cuda.current_stream(self.blocks.device))
        begin = _event()
        with torch.cuda.stream(self._stream):
            begin.record(self._stream)
            for local, remote, _ in moves:
                block, slot = self.blocks[local], self.slots[remote]
                (slot if writes else block).copy_(block if writes else slot, non_blocking=True)
            totals = self._sum_of([move.local for move in moves])
            end = _event()
            end.record(self._stream)
        return StreamTicket(len(moves) * self.blocks.shape[1], totals, begin, end, self.meter)

    def _sum_of(self, blocks: list[int]) -> Tensor:
        rows = StagedRows([blocks], self.blocks.device)
        self._sums(self.blocks, rows.rows[0], rows.sums_S)
        return rows.read_back()


class StreamTicket:
    """A transfer on a stream. It cannot be cancelled."""

    def __init__(
        self, num_bytes: int, totals: Tensor, begin: torch.cuda.Event, end: torch.cuda.Event, meter: LinkMeter
    ) -> None:
        self.bytes = num_bytes
        self.begin, self.end = begin, end
        self._totals, self._meter = totals, meter
        self.sums: list[int] = []
        self._taken = False

    @property
    def seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / 1000 if self._taken else 0.0

    def done(self) -> bool:
        if not self._taken and self.end.query():  # type: ignore[no-untyped-call]
            self._taken = True
            self.sums = self._totals.numpy().view(np.uint64).tolist()
            self._meter.record(self.bytes, self.seconds)
        return self._taken

    def wait(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002 - a copy takes milliseconds
        self.end.synchronize()
        return self.done()

    def error(self) -> TransferError | None:
        return None

    def cancel(self) -> None:
        """It goes on."""


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
