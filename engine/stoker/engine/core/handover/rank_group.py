"""The blocks of an engine of several ranks, as its desks see them: one store and one port.

Each rank holds its layers and heads of every block and moves them itself (`rank_blocks`). A call goes to all ranks, in
order with the steps; what it returns has ended when it has on all of them. Slots are granted on all ranks at once: the
states are here, the bytes and the ports at the ranks. Owned by the core's thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count

from stoker.engine.ranks.block_calls import (
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
from stoker.engine.ranks.rank_calls import CallTicket, RankCalls
from stoker.engine.transfer.intake import CopyAndSum
from stoker.engine.transfer.joint_link import JointLink, Pair, pairs_of
from stoker.engine.transfer.part_plan import PartPlan
from stoker.engine.transfer.port import Link, Move, PortInfo, TransportRefused
from stoker.engine.transfer.socket_port import LATE_S
from stoker.engine.transfer.ticket import LinkMeter
from stoker.engine.transfer.zone_memory import LockedZone


class JointSums:
    """Sums of blocks of which every rank sums its part."""

    def __init__(self, calls: Sequence[CallTicket], joined: Callable[[Sequence[Sequence[int]]], Sequence[int]]) -> None:
        """`joined`: from the sums of each rank's cells."""
        self._calls, self._joined = calls, joined

    def done(self) -> bool:
        return all(call.done() for call in self._calls)

    def values(self) -> Sequence[int]:
        by_rank = []
        for call in self._calls:
            call.wait()
            assert call.ended is not None, "it has ended"
            by_rank.append(call.ended.sums)
        return self._joined(by_rank)


class RankLink:
    """A link between one rank of this engine and one of a peer."""

    def __init__(self, group: RankGroup, rank: int, number: int) -> None:
        self._group, self.rank, self.number = group, rank, number
        self.transport, self.meter = "", LinkMeter()
        self.lost: str | None = None
        self._closed = False

    def write(self, moves: Sequence[Move], tag: bytes) -> CallTicket:
        return self._group.begin_write(
            self.rank, lambda call: WriteCells(call, self.number, tuple(moves), tag), self.transport
        )

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

    def __init__(self, calls: RankCalls, zone: LockedZone) -> None:
        self._calls, self.zone = calls, zone
        calls.listeners.append(self._listen)
        self._infos: dict[int, BlocksOpened] = {}
        self._numbers = count(1)
        self._opening: dict[int, Opening] = {}
        self._links: dict[int, RankLink] = {}
        self._lost: list[str] = []
        self._bytes: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)

    def open(self, calls: Sequence[OpenBlocks]) -> None:
        """Make the ports of all ranks. Raises OSError: one cannot; ExecutorLost."""
        for rank, call in enumerate(calls):
            self._calls.call(rank, call)
        self._calls.wait(lambda: len(self._infos) == len(calls))
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
            calls = self._calls.begin_all(
                lambda rank, call: CopyCells(call, tuple(slots), tuple(blocks), plan.joins[rank])
            )
            return JointSums(calls, plan.received_sums)

        return copy_and_sum

    def sums(self, blocks: Sequence[Sequence[int]], plan: PartPlan) -> JointSums:
        sources = tuple(plan.sources(blocks))
        calls = self._calls.begin_all(lambda rank, call: SumCells(call, sources, plan.cuts[rank]))
        return JointSums(calls, partial(plan.sent_sums, blocks))

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
            self._calls.call(sender, ConnectRank(number, peer[receiver], cells))
        return opening.future

    def lost_peers(self) -> Sequence[str]:
        self._calls.read_reports()
        lost, self._lost = list(dict.fromkeys(self._lost)), []
        for peer in lost:
            self.zone.detach(peer, LATE_S)
        return lost

    def meters(self) -> dict[str, tuple[int, float]]:
        ranks, names = len(self._infos), [name for name, _ in self.describe()[0].endpoints]
        return {name: (self._bytes[name], self._seconds[name] / ranks) for name in names}

    def close(self) -> None:
        """The ranks' parts end with the ranks."""

    def begin_write(self, rank: int, call: Callable[[int], WriteCells], transport: str) -> CallTicket:
        """Begin a write whose bytes and seconds count for a transport."""

        def ended(report: CallEnded) -> None:
            self._bytes[transport] += report.bytes
            self._seconds[transport] += report.seconds

        return self._calls.begin(rank, call, ended)

    def close_link(self, rank: int, number: int) -> None:
        self._links.pop(number, None)
        self._calls.call(rank, CloseLink(number))

    # Reports that end no call.

    def _listen(self, rank: int, report: BlockReport) -> None:
        match report:
            case BlocksOpened():
                self._infos[rank] = report
            case LinkOpened(link=number):
                self._opening.pop(number).note(report)
            case LinkLost(link=number, why=why):
                if number in self._links:
                    self._links.pop(number).lost = why
            case PeersLost(peers=peers):
                self._lost += peers
