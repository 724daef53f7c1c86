"""The link to the host tier of an engine of several ranks: each rank copies its part of a block into its own slot of
the same number. A call goes to all ranks, in order with the steps, and has ended when it has on all of them.

A block's sum is that of its parts, each times an odd number of its rank's place. Made by `build`, called by `host_tier`
in the core's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stoker.engine.ranks.block_calls import BlockReport, FenceSave, LoadBlocks, OpenTier, SaveBlocks, TierOpened
from stoker.engine.ranks.rank_calls import CallTicket, RankCalls
from stoker.engine.transfer.part_plan import joined_sum
from stoker.engine.transfer.port import Move
from stoker.engine.transfer.ticket import LinkMeter, SummedTicket, Ticket, TransferError
from stoker.pod.config_file import ConfigError


class RankTierTicket:
    """A save or a load of all ranks."""

    def __init__(self, calls: Sequence[CallTicket], num_bytes: int, meter: LinkMeter) -> None:
        self.calls, self.bytes, self._meter = calls, num_bytes, meter
        self.sums: list[int] = []
        self._taken = False

    @property
    def seconds(self) -> float:
        return max(call.seconds for call in self.calls)

    def done(self) -> bool:
        if not self._taken and all(call.done() for call in self.calls):
            self._taken = True
            self._take()
        return self._taken

    def _take(self) -> None:
        if self.error() is None:
            parts = [call.ended.sums for call in self.calls if call.ended is not None]
            self.sums = [joined_sum(block) for block in zip(*parts, strict=True)]
            self._meter.record(self.bytes, self.seconds)

    def wait(self, timeout_s: float | None = None) -> bool:
        for call in self.calls:
            call.wait(timeout_s)
        return self.done()

    def error(self) -> TransferError | None:
        return next((error for call in self.calls if (error := call.error())), None)

    def cancel(self) -> None:
        """It goes on."""


class RankTierLink:
    """The slots of all ranks as one."""

    def __init__(self, calls: RankCalls, num_slots: int) -> None:
        """Make the slots of every rank. Raises ConfigError: a rank's memory has no room; ExecutorLost."""
        self._calls, self.meter = calls, LinkMeter()
        self._opened: dict[int, TierOpened] = {}
        calls.listeners.append(self._listen)
        for rank in range(calls.num_ranks):
            calls.call(rank, OpenTier(num_slots))
        calls.wait(lambda: len(self._opened) == calls.num_ranks)
        for rank, opened in sorted(self._opened.items()):
            if opened.error:
                raise ConfigError(
                    f"cache.host_memory_bytes: rank {rank} has no room for {num_slots} blocks: {opened.error}"
                )
        self.transport = self._opened[0].transport
        self.layouts = [layout for _, opened in sorted(self._opened.items()) if (layout := opened.layout)]
        """Of each rank's part of a block."""
        self.block_bytes = sum(layout.block_bytes for layout in self.layouts)
        """Of a block over all ranks."""

    def _listen(self, rank: int, report: BlockReport) -> None:
        if isinstance(report, TierOpened):
            self._opened[rank] = report

    @property
    def lost(self) -> str | None:
        """A lost rank ends the engine, so there is nothing to tell."""
        return None

    def write(self, moves: Sequence[Move], tag: bytes) -> SummedTicket:  # noqa: ARG002 - no peer gets it
        return self._begin(moves, lambda _, call: SaveBlocks(call, tuple(moves)))

    def read(self, moves: Sequence[Move], tag: bytes) -> SummedTicket:  # noqa: ARG002 - no peer gets it
        return self._begin(moves, lambda _, call: LoadBlocks(call, tuple(moves)))

    def _begin(self, moves: Sequence[Move], call: Callable[[int, int], SaveBlocks | LoadBlocks]) -> RankTierTicket:
        return RankTierTicket(self._calls.begin_all(call), len(moves) * self.block_bytes, self.meter)

    def fence(self, ticket: Ticket) -> None:
        assert isinstance(ticket, RankTierTicket), "a ticket of this link"
        for rank, call in enumerate(ticket.calls):
            if call.ended is None:
                self._calls.call(rank, FenceSave(call.number))

    def close(self) -> None:
        """The slots end with their ranks."""
