"""One of several ranks: its part of each block, its slots and its ports. Carries out the leader's calls.

Called in the thread that launches the rank's steps, in order with them; a thread of its own reports what ends later.
Made on each rank by `rank_mover`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

from stoker.engine.core.block_identity import layout_of
from stoker.engine.core.handover.block_memory import RankMemory, open_rank_memory
from stoker.engine.core.handover.host_ports import HostPorts
from stoker.engine.execution.runner import Runner
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.block_calls import (
    BUSY_S,
    IDLE_S,
    BlockCall,
    BlocksOpened,
    CallEnded,
    CloseLink,
    ConnectRank,
    CopyCells,
    LinkLost,
    LinkOpened,
    OpenBlocks,
    PeersLost,
    Report,
    SumCells,
    WriteCells,
)
from stoker.engine.transfer.device_memory import DeviceError
from stoker.engine.transfer.intake import Sums
from stoker.engine.transfer.port import Link
from stoker.engine.transfer.ticket import Ticket


def open_rank_blocks(runner: Runner, plan: EnginePlan, call: OpenBlocks, report: Report) -> RankBlocks | None:
    """Make a rank's zone and ports, and report them; None where they cannot be had, which is reported, too."""
    layout = layout_of(runner)
    folder = Path(call.folder)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        memory = open_rank_memory(runner, layout, call.zone_blocks, plan)
        ports = HostPorts(
            call.fingerprint, layout, memory.local, memory.zone, pod_uid=call.pod_uid, folder=folder, host=call.host,
            port=call.port, key=call.key, require=call.require,  # type: ignore[arg-type] # the configuration's
            transports=call.transports, epoch=call.epoch,  # type: ignore[arg-type]
        )  # fmt: skip
    except (OSError, DeviceError) as error:
        report(BlocksOpened(None, 0, str(error)))
        return None
    report(BlocksOpened(ports.info, memory.nvlinks, ""))
    return RankBlocks(memory, ports, report)


class RankBlocks:
    """The rank's part in all transfers."""

    def __init__(self, memory: RankMemory, ports: HostPorts, report: Report) -> None:
        self._store, self._ports, self._report = memory.store, ports, report
        self._lock = threading.Lock()
        self._opening: dict[int, Future[Link]] = {}
        self._links: dict[int, Link] = {}
        self._writes: dict[int, Ticket] = {}
        self._sums: dict[int, Sums] = {}
        self._wake = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="rank blocks", daemon=True)
        self._thread.start()

    # Calls, in order with steps.

    def do(self, call: BlockCall) -> None:
        """Carry out a call of the leader."""
        match call:
            case ConnectRank(link=number, peer=peer, cells=cells):
                opening = self._ports.connect_rank(peer, cells)
                with self._lock:
                    self._opening[number] = opening
            case WriteCells():
                self._write(call)
            case SumCells(call=number, blocks=blocks, cells=cells):
                self._follow_sums(number, self._store.cell_sums(blocks, cells))
            case CopyCells(call=number, slots=slots, blocks=blocks, cells=cells):
                self._follow_sums(number, self._store.copy_cells(slots, blocks, cells))
            case CloseLink(link=number):
                self._close_link(number)
            case OpenBlocks():
                raise AssertionError("they are open")
        self._wake.set()

    def _write(self, call: WriteCells) -> None:
        with self._lock:
            link = self._links.get(call.link)
        if link is None:
            self._report(CallEnded(call.call, (), 0, 0.0, "the link is closed"))
            return
        ticket = link.write(call.moves, call.tag)
        with self._lock:
            self._writes[call.call] = ticket

    def _follow_sums(self, number: int, sums: Sums) -> None:
        if sums.done():
            self._report(CallEnded(number, tuple(sums.values()), 0, 0.0, ""))
            return
        with self._lock:
            self._sums[number] = sums

    def _close_link(self, number: int) -> None:
        with self._lock:
            opening, link = self._opening.pop(number, None), self._links.pop(number, None)
        if opening is not None:
            opening.add_done_callback(_close_opened)
        if link is not None:
            link.close()

    def close(self) -> None:
        """End the thread, the links and the ports."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._ports.close()

    # The reporting thread.

    def _watch(self) -> None:
        while not self._closed:
            self._wake.wait(BUSY_S if self._opening or self._writes or self._sums else IDLE_S)
            self._wake.clear()
            self._follow_links()
            self._follow_calls()
            if lost := tuple(self._ports.lost_peers()):
                self._report(PeersLost(lost))

    def _follow_links(self) -> None:
        with self._lock:
            opened = {number: future for number, future in self._opening.items() if future.done()}
            for number, future in opened.items():
                del self._opening[number]
                if future.exception() is None:
                    self._links[number] = future.result()
            lost = {number: why for number, link in self._links.items() if (why := link.lost)}
        for number, future in opened.items():
            error = future.exception()
            self._report(LinkOpened(number, "" if error else future.result().transport, str(error) if error else ""))
        for number, why in lost.items():
            self._report(LinkLost(number, why))
            self._close_link(number)

    def _follow_calls(self) -> None:
        with self._lock:
            writes = {number: ticket for number, ticket in self._writes.items() if ticket.done()}
            sums = {number: one for number, one in self._sums.items() if one.done()}
            for number in writes:
                del self._writes[number]
            for number in sums:
                del self._sums[number]
        for number, ticket in writes.items():
            error = ticket.error()
            self._report(CallEnded(number, (), ticket.bytes, ticket.seconds, str(error) if error else ""))
        for number, one in sums.items():
            self._report(CallEnded(number, tuple(one.values()), 0, 0.0, ""))


def _close_opened(opening: Future[Link]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
