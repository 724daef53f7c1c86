"""A pod of several clocked engines, its data ranks, whose report does not tell them apart: the slow twin of ranks that
are choices of their own.

The router chooses the pod; its front gives a request to the rank with the fewest tokens in work.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker.engine.core.core_group import least_loaded
from stoker.engine.http.load_reports import REPORT_S
from stoker.router.load import Load
from stoker.router.snapshot import Role
from stoker.router.standing import Standing, standing_of
from testing.clocked.replica import ClockedReplica


class ClockedPod:
    """The ranks behind one front, in the view of a router."""

    role: Role = "colocated"
    revision = ""
    silent = False

    def __init__(self, ranks: Sequence[ClockedReplica]) -> None:
        self.ranks = tuple(ranks)
        self.identity = ranks[0].identity
        self.load: Load | None = None
        """The newest report to the router."""
        self._reported_s = -REPORT_S

    @property
    def pending(self) -> int:
        return sum(one.pending for one in self.ranks)

    @property
    def unstarted(self) -> tuple[int, ...]:
        """Prompt tokens of requests without a first token."""
        return tuple(tokens for one in self.ranks for tokens in one.unstarted)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens per second by its newest report."""
        return self.load.measured_rate if self.load is not None else None

    @property
    def standing(self) -> Standing:
        """What the router computes of its load now."""
        return standing_of(self)

    def tell(self, now_s: float) -> None:
        """Report its load to the router, if it may already: the sums, as several fronts of an engine add them up."""
        if now_s - self._reported_s < REPORT_S:
            return
        self._reported_s = now_s
        first, *others = self.ranks
        first.reports.others = [one.ledger.share for one in others]
        self.load = Load.model_construct(seq=int(1000 * now_s), **{**first.reports.report(), "queue_s": {}})
        first.reports.others = ()

    @property
    def next_rank(self) -> ClockedReplica:
        """The rank that its front chooses."""
        return self.ranks[least_loaded([(one.tokens_in_work, one.pending) for one in self.ranks])]
