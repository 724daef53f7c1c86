"""The reports of an engine's load that routers follow at `GET /load`.

Several fronts of an engine tell each other their shares, so that each reports the load of all. Owned by `Front`; reads
its ledger, and the core's newest reports.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stoker.engine.config import Role
from stoker.engine.core.stats import SharedStoreStats, TransferStats
from stoker.engine.http.load_ledger import LoadLedger
from stoker.engine.http.load_share import LoadShare
from stoker.engine.http.openai.sse import event
from stoker.engine.http.peer_report import peer_of, split_counts

REPORT_S = 0.1
"""Shortest time between two reports."""
QUIET_S = 0.5
"""Longest time between two reports."""


class LoadReports:
    """The reports of one front on the load of its engine."""

    def __init__(
        self,
        ledger: LoadLedger,
        role: Role = "colocated",
        transfer: Callable[[], TransferStats | None] = lambda: None,
        queue_s: Callable[[], Mapping[int, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
        store: Callable[[], SharedStoreStats | None] = lambda: None,
        step_tokens: Callable[[], tuple[int, int | None]] = lambda: (0, None),
        transfer_of: Callable[[int], TransferStats | None] = lambda _: None,
    ) -> None:
        """`transfer`: the newest report of the core on other engines; `queue_s`: that on times in its queue; `clock`:
        one that processes share; `store`: the core's newest report on the store that engines share; `step_tokens`:
        tokens of a full step, 0 while they are not known, and prompt tokens of one beside decodes (`ModelFacts`);
        `transfer_of`: as `transfer`, of one data rank."""
        self.ledger, self.role, self._clock = ledger, role, clock
        self._transfer, self._transfer_of = transfer, transfer_of
        self._queue_s, self._store, self._step_tokens = queue_s, store, step_tokens
        self.epoch = uuid.uuid4().hex
        """This run of the engine."""
        self.others: Sequence[LoadShare] = ()
        """The newest shares of the engine's other fronts."""

    def report(self) -> dict[str, Any]:
        """The present load of all fronts, with what is computed for other engines; `GET /load` adds a number."""
        helps, store = self._transfer(), self._store()
        step, mixed = self._step_tokens()
        return {
            "epoch": self.epoch,
            **self.ledger.counts(self.others, helps),
            "step_tokens": step,
            "mixed_tokens": mixed,
            "role": self.role,
            "peer": peer_of(helps),
            "queue_s": dict(self._queue_s()),
            **split_counts(helps),
            **({} if store is None else {"store": asdict(store)}),
            **({"ranks": list(map(self._rank_report, range(len(self.ledger.ranks))))} if self.ledger.ranks else {}),
        }

    def _rank_report(self, rank: int) -> dict[str, Any]:
        """The part of one data rank."""
        others = [front.ranks[rank] for front in self.others if front.ranks]
        return self.ledger.ranks[rank].counts(others, self._transfer_of(rank))

    async def stream(self, going_on: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """Yield reports as events until the engine takes no requests: on change, at most ten in a second.

        `seq` is a time in milliseconds. It grows from one stream to the next as well, also where another front sends
        it: a reader that comes back takes the first report for newer than its last.
        """
        seq, last, quiet_s = 0, None, 0.0
        while True:
            counts = self.report()
            if counts != last or quiet_s >= QUIET_S:
                seq = max(seq + 1, int(1000 * self._clock()))
                yield event({"seq": seq, **counts})
                last, quiet_s = counts, 0.0
            if not going_on():
                return
            await asyncio.sleep(REPORT_S)
            quiet_s += REPORT_S
