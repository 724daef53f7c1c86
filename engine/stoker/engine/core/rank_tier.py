"""One of several ranks: its slots of the host tier. Carries out the leader's calls, and reports their ends.

Called in the thread that launches the rank's steps, in order with them; a thread of its own reports what ends later.
Made on each rank by `rank_mover`.
"""

from __future__ import annotations

import threading

from stoker.engine.execution.host_link import HostMemoryLink, PinnedMemoryLink, host_link
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.block_calls import (
    BUSY_S,
    IDLE_S,
    CallEnded,
    FenceSave,
    LoadBlocks,
    OpenTier,
    Report,
    SaveBlocks,
    TierOpened,
)
from stoker.engine.transfer.ticket import SummedTicket


def open_rank_tier(runner: Runner, plan: EnginePlan, call: OpenTier, report: Report) -> RankTier | None:
    """Make a rank's slots and report them; None where they cannot be had, which is reported, too."""
    try:
        link = host_link(runner.cache, call.num_slots, fused=plan.kernels == "fused")
    except (OSError, MemoryError, RuntimeError) as error:  # the last is torch's, for pinned memory
        report(TierOpened(0, "", f"{type(error).__name__}: {error}"))
        return None
    report(TierOpened(runner.cache.data[0].nbytes, link.transport, ""))
    return RankTier(link, report)


class RankTier:
    """The rank's part in all saves and loads."""

    def __init__(self, link: HostMemoryLink | PinnedMemoryLink, report: Report) -> None:
        self._link, self._report = link, report
        self._open: dict[int, SummedTicket] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="rank tier", daemon=True)
        self._thread.start()

    def do(self, call: SaveBlocks | LoadBlocks | FenceSave) -> None:
        """Carry out a call of the leader."""
        match call:
            case SaveBlocks(call=number, moves=moves):
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
                self._report(CallEnded(number, sums, ticket.bytes, ticket.seconds, str(error) if error else ""))
