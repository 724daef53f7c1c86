"""One of several ranks: its slots of the host tier. Carries out the leader's calls, and reports their ends.

Called in the thread that launches the rank's steps, in order with them; a thread of its own reports what ends later.
Made on each rank by `rank_mover`.
"""

from __future__ import annotations

import threading

from stoker.engine.core.block_identity import layout_of
from stoker.engine.core.disk.rank_file_work import RankFileWork
from stoker.engine.execution.host_link import HostMemoryLink, PinnedMemoryLink, host_link
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.block_calls import (
    BUSY_S,
    IDLE_S,
    CallEnded,
    FenceSave,
    FileCall,
    LoadBlocks,
    OpenFiles,
    OpenLane,
    OpenTier,
    ReadPart,
    RemovePart,
    Report,
    SaveBlocks,
    TierOpened,
    WritePart,
)
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.port import Move
from stoker.engine.transfer.ticket import SummedTicket


def open_rank_tier(runner: Runner, plan: EnginePlan, call: OpenTier, report: Report) -> RankTier | None:
    """Make a rank's slots and report them; None where they cannot be had, which is reported, too."""
    try:
        link = host_link(runner.cache, call.num_slots, fused=plan.kernels == "fused")
    except (OSError, MemoryError, RuntimeError) as error:  # the last is torch's, for pinned memory
        report(TierOpened(None, "", f"{type(error).__name__}: {error}"))
        return None
    layout = layout_of(runner)
    report(TierOpened(layout, link.transport, ""))
    return RankTier(link, layout, report)


class RankTier:
    """The rank's part in all saves and loads, and in files of what was saved."""

    def __init__(self, link: HostMemoryLink | PinnedMemoryLink, layout: BlockLayout, report: Report) -> None:
        self._link, self._layout, self._report = link, layout, report
        self._open: dict[int, SummedTicket] = {}
        self._saving: dict[int, tuple[Move, ...]] = {}
        self._slot_sums: dict[int, int] = {}
        """Raw sums of what is in the slots."""
        self._files: RankFileWork | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="rank tier", daemon=True)
        self._thread.start()

    def do(self, call: SaveBlocks | LoadBlocks | FenceSave | FileCall) -> None:
        """Carry out a call of the leader."""
        match call:
            case OpenFiles():
                self._files = RankFileWork(call, self._layout, self._link.memory, self._slot_sums, self._report)
            case WritePart() | ReadPart() | OpenLane() | RemovePart():
                assert self._files is not None, "the leader opens them first"
                self._files.do(call)
            case SaveBlocks(call=number, moves=moves):
                self._saving[number] = moves
                self._follow(number, self._link.write(moves, b""))
            case LoadBlocks(call=number, moves=moves):
                self._follow(number, self._link.read(moves, b""))
            case FenceSave(call=number):
                with self._lock:
                    ticket = self._open.get(number)
                if ticket is not None:  # else it has ended
                    self._link.fence(ticket)

    def _follow(self, number: int, ticket: SummedTicket) -> None:
        with self._lock:
            self._open[number] = ticket
        self._wake.set()

    def close(self) -> None:
        """End the threads."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        if self._files is not None:
            self._files.close()
        self._link.close()

    def _watch(self) -> None:
        while not self._closed:
            self._wake.wait(BUSY_S if self._open else IDLE_S)
            self._wake.clear()
            with self._lock:
                ended = {number: ticket for number, ticket in self._open.items() if ticket.done()}
                for number in ended:
                    del self._open[number]
            for number, ticket in ended.items():
                error = ticket.error()
                sums = () if error else tuple(ticket.sums)
                moves = self._saving.pop(number, ())
                self._slot_sums.update((move.remote, one) for move, one in zip(moves, sums, strict=False))
                self._report(CallEnded(number, sums, ticket.bytes, ticket.seconds, str(error) if error else ""))
