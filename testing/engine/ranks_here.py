"""An engine of several ranks in one process: real parts of blocks, ports and sockets of each rank, no model.

What the ranks' processes do with the leader's calls happens here at once, in the caller's thread.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np

from stoker.engine.core.handover.block_memory import RankMemory
from stoker.engine.core.handover.host_ports import HostPorts
from stoker.engine.core.handover.host_store import HostStore
from stoker.engine.core.handover.rank_blocks import RankBlocks
from stoker.engine.core.handover.rank_group import RankGroup
from stoker.engine.ranks.block_calls import BlockCall, BlockReport, BlocksOpened, OpenBlocks
from stoker.engine.ranks.rank_calls import RankCalls
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.rank_zone import RankZone
from stoker.engine.transfer.zone_memory import LockedZone


class RankHere:
    """One rank's part of all blocks."""

    def __init__(self, cache_BN: np.ndarray, layout: BlockLayout, report: Callable[[BlockReport], None]) -> None:
        self.cache_BN, self.layout, self.report = cache_BN, layout, report
        self.ports: HostPorts | None = None
        self._blocks: RankBlocks | None = None

    def do(self, call: BlockCall) -> None:
        if isinstance(call, OpenBlocks):
            self._open(call)
            return
        assert self._blocks is not None, "the leader opens them first"
        self._blocks.do(call)

    def _open(self, call: OpenBlocks) -> None:
        folder, zone = Path(call.folder), RankZone(call.zone_blocks, self.layout.block_bytes)
        folder.mkdir(exist_ok=True)
        self.ports = HostPorts(
            call.fingerprint, self.layout, self.cache_BN, zone, pod_uid=call.pod_uid, folder=folder, host=call.host,
            port=call.port, key=call.key, require="any", transports=call.transports,  # type: ignore[arg-type]
            epoch=call.epoch,
        )  # fmt: skip
        self._blocks = RankBlocks(
            RankMemory(self.cache_BN, zone, HostStore(zone.memory_SN, self.cache_BN, self.layout)),
            self.ports,
            self.report,
        )
        self.report(BlocksOpened(self.ports.info, 0, ""))

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()


class RanksHere:
    """As much of the executor as calls to ranks need."""

    def __init__(self, caches: Sequence[np.ndarray], layouts: Sequence[BlockLayout]) -> None:
        reports: queue.SimpleQueue[tuple[int, BlockReport | BaseException]] = queue.SimpleQueue()
        self.block_reports = reports
        self.calls = RankCalls(len(caches), self, self.in_order)
        self.ranks: list[RankHere] = [
            RankHere(cache_BN, layout, lambda report, rank=rank: reports.put((rank, report)))  # type: ignore[misc]
            for rank, (cache_BN, layout) in enumerate(zip(caches, layouts, strict=True))
        ]
        self.calls.own = self.ranks[0]

    def send_to(self, rank: int, message: BlockCall) -> None:
        self.ranks[rank].do(message)

    def check(self) -> None:
        """None is lost alone."""

    def in_order(self, call: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        call()
        done.set_result(None)
        return done

    def open(self, own: OpenBlocks, clock: Callable[[], float]) -> RankGroup:
        """Make the ports of all ranks."""
        group = RankGroup(self.calls, LockedZone(own.zone_blocks, clock))
        group.open([own._replace(folder=f"{own.folder}/rank-{rank}") for rank in range(len(self.ranks))])
        return group

    @property
    def ports(self) -> list[HostPorts]:
        return [rank.ports for rank in self.ranks if rank.ports is not None]


def head_layouts(whole: BlockLayout, count: int) -> list[BlockLayout]:
    """The layouts of tensor ranks with as many heads each."""
    each = whole.num_heads // count
    return [replace(whole, first_head=rank * each, end_head=(rank + 1) * each) for rank in range(count)]
