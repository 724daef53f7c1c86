"""The blocks of an engine of several ranks, as its desks see them: one store and one port.

Each rank holds its heads of every block and moves them itself (`rank_blocks`). A call goes to all ranks, in order with
the steps; what it returns has ended when it has on all of them. Slots are granted on all ranks at once: the states are
here, the bytes and the ports at the ranks. Owned by the core's thread.
"""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count

from stoker.engine.core.handover.host_store import grouped
from stoker.engine.core.handover.rank_blocks import RankBlocks, open_rank_blocks
from stoker.engine.plan import EnginePlan
from stoker.engine.ranks.block_calls import (
    BlockCall,
    BlockReport,
    BlocksOpened,
    CallEnded,
    CloseLink,
    ConnectRank,
    CopyCells,
    LinkLost,
    LinkOpened,
    OpenBlocks,
    PeersLost,
    SumCells,
    WriteCells,
)
from stoker.engine.ranks.executor import Ranks
from stoker.engine.transfer.intake import CopyAndSum
from stoker.engine.transfer.joint_link import JointLink, Pair, pairs_of
from stoker.engine.transfer.layout import Grid
from stoker.engine.transfer.part_plan import PartPlan
from stoker.engine.transfer.port import Link, Move, PortInfo, TransportRefused
from stoker.engine.transfer.socket_port import LATE_S
from stoker.engine.transfer.ticket import LinkMeter, TransferError
from stoker.engine.transfer.zone_memory import LockedZone

POLL_S = 0.05


class CallTicket:
    """A call of one rank."""

    bytes = 0

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self.ended: CallEnded | None = None

    @property
    def seconds(self) -> float:
        return self.ended.seconds if self.ended is not None else 0.0

    def done(self) -> bool:
        self._group.read_reports()
        return self.ended is not None

    def wait(self, timeout_s: float | None = None) -> bool:  # noqa: ARG002 - until it ends, or a rank is lost
        self._group.wait(self.done)
        return True

    def error(self) -> TransferError | None:
        return TransferError(self.ended.error) if self.ended is not None and self.ended.error else None

    def cancel(self) -> None:
        """It goes on."""


class JointSums:
    """Sums of blocks of which every rank sums its part."""

    def __init__(
        self, calls: Sequence[CallTicket], grids: Sequence[Grid], joined: Callable[[Sequence[Sequence[int]]], int]
    ) -> None:
        self._calls, self._grids, self._joined = calls, grids, joined

    def done(self) -> bool:
        return all(call.done() for call in self._calls)

    def values(self) -> Sequence[int]:
        by_rank = []
        for call, grid in zip(self._calls, self._grids, strict=True):
            call.wait()
            assert call.ended is not None, "it has ended"
            by_rank.append(grouped(call.ended.sums, grid.cells))
        return [self._joined(block) for block in zip(*by_rank, strict=True)]


class RankLink:
    """A link between one rank of this engine and one of a peer."""

    def __init__(self, group: RankGroup, rank: int, number: int) -> None:
        self._group, self.rank, self.number = group, rank, number
        self.transport, self.meter = "", LinkMeter()
        self.lost: str | None = None
        self._closed = False

    def write(self, moves: Sequence[Move], tag: bytes) -> CallTicket:
        group = self._group
        return group.begin(self.rank, lambda call: WriteCells(call, self.number, tuple(moves), tag), self.transport)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._group.close_link(self.rank, self.number)


class Opening:
    """A connection to all ranks of a peer that is being made."""

    def __init__(self, plan: PartPlan, links: Mapping[Pair, RankLink], numbers: Mapping[int, RankLink]) -> None:
        self.future: Future[Link] = Future()
        self._plan, self._links, self._waiting = plan, links, dict(numbers)
        self._errors: list[str] = []

    def note(self, report: LinkOpened) -> None:
        """Take one rank's answer; the future is done with the last one."""
        link = self._waiting.pop(report.link)
        link.transport = report.transport
        if report.error:
            link.lost = report.error
            self._errors.append(report.error)
        if self._waiting:
            return
        if not self._errors:
            self.future.set_result(JointLink(self._plan, self._links))
            return
        for one in self._links.values():
            one.close()
        self.future.set_exception(TransportRefused([("a rank's link", self._errors[0])]))


class RankGroup:
    """All ranks of this engine."""

    def __init__(self, ranks: Ranks, zone: LockedZone) -> None:
        self._ranks, self.zone = ranks, zone
        self._reports: queue.SimpleQueue[tuple[int, BlockReport | BaseException]] = ranks.workers.block_reports
        self._own: RankBlocks | None = None
        self._infos: dict[int, BlocksOpened] = {}
        self._numbers = count(1)
        self._calls: dict[int, tuple[CallTicket, str]] = {}
        self._opening: dict[int, Opening] = {}
        self._links: dict[int, RankLink] = {}
        self._lost: list[str] = []
        self._bytes: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)

    def open(self, plan: EnginePlan, calls: Sequence[OpenBlocks]) -> None:
        """Make the ports of all ranks. Raises OSError: one cannot; ExecutorLost."""
        for rank, call in enumerate(calls[1:], 1):
            self._ranks.workers.send_to(rank, call)
        report = lambda one: self._reports.put((0, one))  # noqa: E731
        self._own = self._ranks.wait(
            self._ranks.in_order(lambda: open_rank_blocks(self._ranks.runner, plan, calls[0], report))
        )
        self.wait(lambda: len(self._infos) == len(calls))
        for rank, opened in sorted(self._infos.items()):
            if opened.error:
                raise OSError(f"rank {rank}: {opened.error}")

    @property
    def nvlinks(self) -> int:
        """Of the rank with the fewest."""
        return min(opened.nvlinks for opened in self._infos.values())

    # As a store.

    def copier(self, plan: PartPlan) -> CopyAndSum:
        def copy_and_sum(slots: Sequence[int], blocks: Sequence[int]) -> JointSums:
            calls = self._begin_all(lambda rank, call: CopyCells(call, tuple(slots), tuple(blocks), plan.joins[rank]))
            return JointSums(calls, plan.joins, plan.received_sum)

        return copy_and_sum

    def sums(self, blocks: Sequence[int], plan: PartPlan) -> JointSums:
        calls = self._begin_all(lambda rank, call: SumCells(call, tuple(blocks), plan.cuts[rank]))
        return JointSums(calls, plan.cuts, plan.sent_sum)

    # As a port.

    def describe(self) -> tuple[PortInfo, ...]:
        infos = [self._infos[rank].info for rank in range(len(self._infos))]
        return tuple(info for info in infos if info is not None)

    def connect(self, peer: Sequence[PortInfo], plan: PartPlan) -> Future[Link]:
        links = {pair: RankLink(self, pair[0], next(self._numbers)) for pair in pairs_of(plan)}
        numbered = {link.number: link for link in links.values()}
        opening = Opening(plan, links, numbered)
        for (sender, receiver), link in links.items():
            number = link.number
            self._opening[number], self._links[number] = opening, link
            cells = plan.cells((sender, receiver))._replace(ranks=len(self._infos))
            self.call(sender, ConnectRank(number, peer[receiver], cells))
        return opening.future

    def lost_peers(self) -> Sequence[str]:
        self.read_reports()
        lost, self._lost = list(dict.fromkeys(self._lost)), []
        for peer in lost:
            self.zone.detach(peer, LATE_S)
        return lost

    def meters(self) -> dict[str, tuple[int, float]]:
        ranks, names = len(self._infos), [name for name, _ in self.describe()[0].endpoints]
        return {name: (self._bytes[name], self._seconds[name] / ranks) for name in names}

    def close(self) -> None:
        """Close rank 0's part; the others end with their ranks."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def close_link(self, rank: int, number: int) -> None:
        self._links.pop(number, None)
        self.call(rank, CloseLink(number))

    # Calls and reports.

    def call(self, rank: int, call: BlockCall) -> None:
        """Let a rank do something behind the steps that were submitted."""
        if rank:
            self._ranks.workers.send_to(rank, call)
            return
        own = self._own
        if own is None:
            return  # closed
        self._ranks.in_order(lambda: own.do(call)).add_done_callback(self._note_failure)

    def _note_failure(self, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            self._reports.put((0, error))

    def begin(self, rank: int, call: Callable[[int], BlockCall], transport: str = "") -> CallTicket:
        """Begin a call that is reported when it has ended. `call` makes it from its number."""
        number, ticket = next(self._numbers), CallTicket(self)
        self._calls[number] = ticket, transport
        self.call(rank, call(number))
        return ticket

    def _begin_all(self, call: Callable[[int, int], BlockCall]) -> list[CallTicket]:
        """Begin a call on every rank. `call` makes it from the rank and its number."""
        return [self.begin(rank, partial(call, rank)) for rank in range(len(self._infos))]

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for what reports bring. Raises ExecutorLost where a rank is lost before."""
        while not condition():
            self._ranks.check()
            try:
                rank, report = self._reports.get(timeout=POLL_S)
            except queue.Empty:
                continue
            self._take(rank, report)

    def read_reports(self) -> None:
        """Take what the ranks have reported since the last call."""
        while True:
            try:
                rank, report = self._reports.get_nowait()
            except queue.Empty:
                return
            self._take(rank, report)

    def _take(self, rank: int, report: BlockReport | BaseException) -> None:
        match report:
            case BlocksOpened():
                self._infos[rank] = report
            case LinkOpened(link=number):
                self._opening.pop(number).note(report)
            case CallEnded(call=number):
                ticket, transport = self._calls.pop(number)
                ticket.ended = report
                self._bytes[transport] += report.bytes
                self._seconds[transport] += report.seconds
            case LinkLost(link=number, why=why):
                if number in self._links:
                    self._links.pop(number).lost = why
            case PeersLost(peers=peers):
                self._lost += peers
            case BaseException():
                raise report
