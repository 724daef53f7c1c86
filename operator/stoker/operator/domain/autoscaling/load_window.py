"""The last minutes of a pool's load, kept from the counters of its engines. No I/O, no clock of its own.

One for each pool, owned by the loop's `LoadWatch` or by a simulation. `record` takes an engine's report when it comes;
`measure` gives what a review needs. Requests are counted in slots of `SLOT_S`, so that its size does not depend on the
number of engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from stoker.operator.domain.autoscaling.decision import MAX_AGE_S, Measured
from stoker.operator.domain.autoscaling.demand import Demand, burstiness, forecast_rate
from stoker.operator.domain.autoscaling.evidence import Evidence
from stoker.operator.domain.autoscaling.goal_report import GoalReport
from stoker.operator.domain.autoscaling.load_report import LoadCounts, LoadReport, total
from stoker.operator.domain.autoscaling.prediction import EngineShape
from stoker.operator.domain.autoscaling.step_curve import CurveSums, StepCurve, fit_curve
from stoker.pod.histogram import merged

SLOT_S = 5.0
DEMAND_S = 300.0
"""Time from which demand and sizes are taken."""
CURVE_S = 900.0
EVIDENCE_S = 900.0
MEASURED_S = 60.0
ENOUGH_REQUESTS = 20
"""Fewer in a minute give no 95th percentile."""
YOUNG_S = 60.0
"""A replica's first minute does not count into measured times: it warms up."""


@dataclass
class _Slot:
    number: int
    arrived: int
    grown: LoadCounts
    """Of engines of any age."""
    settled: LoadCounts
    """Of engines older than `YOUNG_S`."""
    curve: CurveSums
    goals: GoalReport = field(default_factory=GoalReport)
    """Requests that engines do not see, by the routers."""
    engines: set[str] = field(default_factory=set)
    """Those that reported, also while they drain."""

    @property
    def requests(self) -> int:
        """Requests that came to engines, and those that routers kept back, which may come to them later."""
        return max(self.arrived + self.goals.arrived, 0)


class LoadWindow:
    """Counters of one pool by slots, and the newest report of each engine."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, LoadReport]] = {}
        self._routers: dict[str, GoalReport] = {}
        self._first_s: dict[str, float] = {}
        self._slots: deque[_Slot] = deque()
        self._shape: EngineShape | None = None
        self._began_s: float | None = None

    def record(self, now_s: float, engine: str, report: LoadReport) -> None:
        """Take the report of one engine, by pod uid.

        The first report, also after its counters began anew, counts nothing: the time of what it tells is unknown.
        """
        known = self._last.get(engine)
        grown = report.counts.since(known[1].counts) if known else None
        if grown is None:
            self._first_s[engine] = now_s
            grown = LoadCounts()
        self._last[engine] = now_s, report
        self._began_s = now_s if self._began_s is None else self._began_s
        self._shape = EngineShape(
            report.total_tokens, report.max_requests, report.max_batch_tokens, report.mixed_tokens
        )
        self._add(now_s, engine, grown, settled=now_s - self._first_s[engine] >= YOUNG_S)

    def record_router(self, now_s: float, router: str, report: GoalReport) -> None:
        """Take the report of one router, by pod uid. The first one counts what waits alone."""
        grown = report.since(self._routers.get(router, replace(report, waiting=0)))
        self._routers[router] = report
        if grown != GoalReport():
            slot = self._slot(now_s)
            slot.goals = slot.goals.plus(grown)

    @property
    def waiting_in_routers(self) -> int:
        """Requests with a goal that wait in routers, by their newest reports."""
        return sum(report.waiting for report in self._routers.values())

    def forget(self, engines: Iterable[str], routers: Iterable[str] = ()) -> None:
        """Keep the newest reports of these engines and routers only; what others did stays counted."""
        kept, known = set(engines), set(routers)
        self._routers = {router: found for router, found in self._routers.items() if router in known}
        self._last = {engine: found for engine, found in self._last.items() if engine in kept}
        self._first_s = {engine: found for engine, found in self._first_s.items() if engine in kept}

    def age_s(self, engine: str, now_s: float) -> float | None:
        """Seconds since the engine's newest report; None if it has given none."""
        known = self._last.get(engine)
        return now_s - known[0] if known else None

    def newest(self, engines: Iterable[str]) -> list[LoadReport]:
        """The newest reports of these engines."""
        return [self._last[engine][1] for engine in engines if engine in self._last]

    @property
    def shape(self) -> EngineShape | None:
        return self._shape

    def rate(self, now_s: float) -> float:
        """Requests per second of the last half minute."""
        arrivals = self._arrivals(now_s)[-6:]
        return sum(arrivals) / (len(arrivals) * SLOT_S) if arrivals else 0.0

    def demand(self, now_s: float, horizon_s: float) -> Demand | None:
        """The demand to expect within `horizon_s`; None where requests came but none has ended yet."""
        arrivals = self._arrivals(now_s)
        counts = total([slot.grown for slot in self._recent(now_s, DEMAND_S)])
        if sum(arrivals) == 0 and counts.first_tokens == 0:
            return Demand(0.0, 1.0, counts.uncached, 0.0, 0.0)
        if not counts.output.total:
            counts = total([slot.grown for slot in self._slots])
        if not counts.output.total:
            return None
        rate = forecast_rate(arrivals, SLOT_S, horizon_s)
        return Demand(rate, burstiness(arrivals), counts.uncached, counts.prompt.moment(), counts.output.moment())

    def curve(self) -> StepCurve | None:
        """The measured step times."""
        return fit_curve(slot.curve for slot in self._slots)

    def measured(self, now_s: float) -> Measured:
        """The 95th percentiles of the last minute."""
        slots = self._recent(now_s, MEASURED_S)
        counts = total([slot.settled for slot in slots])
        enough = counts.first_token_s.total >= ENOUGH_REQUESTS
        gaps = counts.token_gap_s.total >= ENOUGH_REQUESTS
        return Measured(
            counts.first_token_s.quantile(0.95) if enough else None,
            counts.token_gap_s.quantile(0.95) if gaps else None,
            _late_share(slots),
        )

    def evidence(self, now_s: float, replicas: int) -> Evidence:
        """What was measured in the newest complete slots in which no more than `replicas` engines reported."""
        newest, began_s = int(now_s // SLOT_S) - 1, now_s if self._began_s is None else self._began_s
        oldest = max(newest - round(EVIDENCE_S / SLOT_S) + 1, int(began_s // SLOT_S) + 1)
        known = {slot.number: slot for slot in self._slots if oldest <= slot.number <= newest}
        larger = [number for number, slot in known.items() if len(slot.engines) > replicas]
        oldest = max([oldest, *(number + 1 for number in larger)])
        found = [slot for number, slot in known.items() if number >= oldest]
        return Evidence(
            SLOT_S,
            tuple(known[number].requests if number in known else 0 for number in range(oldest, newest + 1)),
            merged(slot.grown.first_token_s for slot in found),
            merged(slot.grown.token_gap_s for slot in found),
            late=sum(slot.goals.late for slot in found),
            refused=sum(slot.goals.refused for slot in found),
        )

    def _add(self, now_s: float, engine: str, grown: LoadCounts, *, settled: bool) -> None:
        slot = self._slot(now_s)
        slot.engines.add(engine)
        slot.arrived += grown.arrived
        slot.grown = total([slot.grown, grown])
        if settled:
            slot.settled = total([slot.settled, grown])
        slot.curve = slot.curve.plus(grown)

    def _slot(self, now_s: float) -> _Slot:
        """The slot of now; those that are too old are forgotten."""
        number = int(now_s // SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(_Slot(number, 0, LoadCounts(), LoadCounts(), CurveSums()))
        while self._slots[0].number < number - CURVE_S / SLOT_S:
            self._slots.popleft()
        return self._slots[-1]

    def _recent(self, now_s: float, seconds: float) -> list[_Slot]:
        first = int(now_s // SLOT_S) - round(seconds / SLOT_S)
        return [slot for slot in self._slots if slot.number >= first]

    def arrivals(self, now_s: float) -> tuple[int, ...]:
        """Requests of each complete slot that is remembered, oldest first."""
        return tuple(self._arrivals(now_s, EVIDENCE_S))

    def _arrivals(self, now_s: float, seconds: float = DEMAND_S) -> list[int]:
        """Requests of each complete slot of the last minutes, oldest first, zero where no report came."""
        if self._began_s is None:
            return []
        last = int(now_s // SLOT_S) - 1
        first = max(last - round(seconds / SLOT_S) + 1, int(self._began_s // SLOT_S) + 1)
        found = {slot.number: slot.requests for slot in self._slots}
        return [found.get(number, 0) for number in range(first, last + 1)]


def _late_share(slots: Iterable[_Slot]) -> float:
    """Share of the requests whose goal was missed before an engine had them."""
    goals, answered = GoalReport(), 0
    for slot in slots:
        goals, answered = goals.plus(slot.goals), answered + slot.grown.first_tokens
    seen = answered + goals.refused
    return min(goals.missed / seen, 1.0) if seen >= ENOUGH_REQUESTS else 0.0


def stale(window: LoadWindow, engine: str, name: str, known_since_s: float, now_s: float) -> str | None:
    """A line about an engine whose load is not known, for `PoolInput.unknown`; None while it is known.

    Args:
        known_since_s: when the engine was first found ready; it has as long as any report may be old.
    """
    age_s = window.age_s(engine, now_s)
    if age_s is not None and age_s <= MAX_AGE_S:
        return None
    if age_s is None:
        waited_s = now_s - known_since_s
        return f"engine {name} has reported no load for {waited_s:.0f} s" if waited_s > MAX_AGE_S else None
    return f"the load of engine {name} is {age_s:.0f} s old"
