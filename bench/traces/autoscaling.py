"""The autoscaler's rule on public traces in virtual time: SLO attained and replica hours, against a static fleet.

The engine's real scheduler and blocks run over a stated step curve; the router's policy, the autoscaler's windows and
its rule are those of production. A replica starts in 120 s. The static fleet is the smallest that attains 95.8 %.

    python -m bench.traces.autoscaling FOLDER azure_2023_code
    python -m bench.traces.autoscaling FOLDER azure_2023_code_day mooncake_conversation
    python -m bench.traces.autoscaling FOLDER azure_2023_code --static 18 --foresight 1 30
    python -m bench.traces.autoscaling FOLDER azure_2023_code --static 18 --foresight 8 32 --unordered 300 600
    python -m bench.traces.autoscaling FOLDER azure_2023_code --static 17 --late 1.3 --static-late 11

`--foresight` asks what a pool of 1 to 30 replicas would cost that knows the trace: it orders replicas 120 s before they
are needed. The plan is served by the simulation, because a pool in change has a backlog. With `--unordered` the pool
knows the parts of so many seconds, but not their order. `--late`: the router has a class with this goal in seconds
whose late requests wait behind the others; the static fleet is the one without, and the smallest one with it is told,
too. FOLDER holds the traces (`azure_2023_code.csv`, `mooncake_conversation.jsonl`). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.operator.domain.autoscaling.decision import Limits
from stoker.operator.domain.autoscaling.prediction import Goals
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from stoker.router.request_class import RequestClass
from testing.clocked.fleet import FleetResult, FleetSettings, simulate, smallest_static
from testing.clocked.foresight import Plan, least_hours
from testing.clocked.replica import EngineSettings
from testing.clocked.trace import TracedRequest, multiplied, read_trace, repeated
from testing.clocked.unordered import least_unordered

SHARE = 0.958
STARTUP_S = 120.0
SLOT_S = 60.0
"""A pool with foresight keeps its size for so long."""
CURVE = StepCurve(base_s=0.015, prompt_token_s=8e-5, decode_token_s=1e-4)
"""About an 8B model on a third of an H200: 12,500 prompt tokens/s, 15 ms a step."""


@dataclass(frozen=True)
class Case:
    """A trace, the engine and the goals."""

    requests: Callable[[Path], Sequence[TracedRequest]]
    goals: Goals
    engine: EngineSettings
    policy: str = "leastPending"


@dataclass(frozen=True)
class Late:
    """A router whose late requests wait behind the others."""

    goal_s: float
    static: int | None = None
    """Size of the smallest static fleet with it, where it is known."""

    @property
    def classes(self) -> tuple[RequestClass, ...]:
        first = RequestClass(name="interactive", ttft_goal_s=self.goal_s, late_class="late")
        return first, RequestClass(name="late", max_queue_s=3600, aging_s=600)


def day(at_s: float) -> float:
    """The share of the trace's rate over six hours: a sine whose mean is half of its peak."""
    return 0.5 - 0.5 * math.cos(2 * math.pi * at_s / 21600)


PLAIN = EngineSettings(CURVE, prefix_cache=False)
CASES = {
    "azure_2023_code": Case(
        lambda folder: multiplied(read_trace(folder / "azure_2023_code.csv"), 3, 2.0), Goals(2.0, 0.15), PLAIN
    ),
    "azure_2023_code_day": Case(
        lambda folder: repeated(multiplied(read_trace(folder / "azure_2023_code.csv"), 3, 2.0), 21600, day),
        Goals(2.0, 0.15),
        PLAIN,
    ),
    "mooncake_conversation": Case(
        lambda folder: read_trace(folder / "mooncake_conversation.jsonl"),
        Goals(8.0, 0.2),
        EngineSettings(CURVE, kv_tokens=400_000),
        "cacheAware",
    ),
}


def main() -> None:
    """Run the named cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--static", type=int, help="size of the smallest static fleet, where it is known")
    parser.add_argument("--foresight", type=int, nargs=2, metavar=("LOW", "HIGH"), help="sizes of a pool that knows")
    parser.add_argument("--late", type=float, metavar="SECONDS", help="goal of a class with a class for late requests")
    parser.add_argument(
        "--static-late", type=int, help="size of the smallest static fleet with them, where it is known"
    )
    parser.add_argument("--unordered", type=float, nargs="+", metavar="SECONDS", help="it does not know their order")
    arguments = parser.parse_args()
    if arguments.foresight:
        low, high = arguments.foresight
        for name in arguments.cases:
            asked = CASES[name], arguments.folder, arguments.static, range(low, high + 1)
            found = unordered(*asked, arguments.unordered) if arguments.unordered else foreseen(*asked)
            print(json.dumps({name: found}))
        return
    late = Late(arguments.late, arguments.static_late) if arguments.late else None
    print(
        json.dumps({name: measure(CASES[name], arguments.folder, arguments.static, late) for name in arguments.cases})
    )


def foreseen(case: Case, folder: Path, static: int | None, sizes: Sequence[int]) -> dict[str, Any]:
    """Hours of a pool that knows the trace, pays for starts and orders one turn at most in ten minutes."""
    requests = case.requests(folder)
    settings = FleetSettings(case.engine, startup_s=STARTUP_S, policy=case.policy)
    missed = missed_by_size(settings, requests, case.goals, sizes)
    plan, result = served_plan(settings, requests, case.goals, missed)
    if plan is None or result is None:
        return {"sizes": [*sizes], "plan": None}
    share = round(result.replica_s / (requests[-1].at_s * static), 3) if static else None
    attained = round(result.attained(case.goals), 4)
    return {"plan": plan.sizes, "slot_s": SLOT_S, "attained": attained, "hours_share": share}


def unordered(
    case: Case, folder: Path, static: int | None, sizes: Sequence[int], parts_s: Sequence[float]
) -> dict[str, Any]:
    """Hours to expect of a pool that knows the parts of the trace, but not their order; by the length of a part."""
    requests = case.requests(folder)
    settings = FleetSettings(case.engine, startup_s=STARTUP_S, policy=case.policy)
    missed = missed_by_size(settings, requests, case.goals, sizes)
    slots = len(missed[sizes[0]])
    shares: dict[str, Any] = {}
    for part_s in parts_s:
        length = round(part_s / SLOT_S)
        begins = range(0, slots, length)
        parts = {size: [sum(found[begin : begin + length]) for begin in begins] for size, found in missed.items()}
        lengths = [min(length, slots - begin) for begin in begins]
        expected = least_unordered(parts, lengths, (1 - SHARE) * len(requests))
        if expected is not None and static is not None:
            shares[f"{part_s:g} s"] = round(expected.replica_slots / (slots * static), 3)
    return shares


def missed_by_size(
    settings: FleetSettings, requests: Sequence[TracedRequest], goals: Goals, sizes: Sequence[int]
) -> dict[int, list[int]]:
    """Requests that missed a goal, by the size of a fixed pool and the slot of their arrival."""
    missed = {size: [0] * (int(requests[-1].at_s // SLOT_S) + 1) for size in sizes}
    for size in sizes:
        for served in simulate(replace(settings, replicas=size), requests).served:
            missed[size][int(served.request.at_s // SLOT_S)] += not served.meets(goals)
    return missed


def served_plan(
    settings: FleetSettings, requests: Sequence[TracedRequest], goals: Goals, missed: Mapping[int, Sequence[int]]
) -> tuple[Plan | None, FleetResult | None]:
    """The cheapest plan that attains the share when it is served: backlogs of smaller slots cost it some requests."""
    most = int((1 - SHARE) * len(requests))
    allowed = most
    while plan := least_hours(missed, allowed, round(600 / SLOT_S), round(STARTUP_S / SLOT_S)):
        planned = replace(settings, replicas=plan.sizes[0], orders=tuple(plan.orders(SLOT_S)))
        result = simulate(planned, requests)
        lost = sum(not found.meets(goals) for found in result.served)
        if lost <= most:
            return plan, result
        allowed = plan.missed - max((lost - most) // 2, 1)
    return None, None


def measure(case: Case, folder: Path, known: int | None, late: Late | None = None) -> dict[str, Any]:
    """Serve one trace with the static fleet and with the autoscaler, perhaps with late requests behind the others."""
    requests = case.requests(folder)
    settings = FleetSettings(case.engine, startup_s=STARTUP_S, policy=case.policy)
    began = time.monotonic()
    static, whole = smallest_static(settings, requests, case.goals, SHARE, begin=known or 1)
    print(f"static: {static} replicas, {whole.attained(case.goals):.2%}, {time.monotonic() - began:.0f} s", flush=True)
    limits = Limits(1, 64, goals=case.goals, puts_late_behind=late is not None)
    own = replace(settings, classes=late.classes if late else ())
    scaled = simulate(replace(own, replicas=static, limits=limits), requests)
    result = {
        "requests": len(requests),
        "static_replicas": static,
        "static_attained": round(whole.attained(case.goals), 4),
        "attained": round(scaled.attained(case.goals), 4),
        "hours_share": round(scaled.replica_s / whole.replica_s, 3),
        "most_replicas": scaled.most,
        "reversals_in_10_min": scaled.most_turns(),
    }
    if late is not None:
        fewest, served = smallest_static(own, requests, case.goals, SHARE, begin=late.static or 1)
        result |= {"static_late_replicas": fewest, "static_late_attained": round(served.attained(case.goals), 4)}
    for found in scaled.decisions:
        print(f"{found.at_s:7.0f} s {found.before} -> {found.after} {found.reason}: {found.message}", flush=True)
    print(result, flush=True)
    return result


if __name__ == "__main__":
    main()
