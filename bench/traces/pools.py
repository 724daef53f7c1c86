"""The autoscaler's rule for a prefill and a decode pool on a public trace in virtual time: goals and replica hours.

The router's choice of pairs, the engine's scheduler and blocks, the windows and the rule are those of production.
Blocks travel at the rate of an NVLink. The trace is that of Azure's conversations of 2023, whose rate follows a sine
over half an hour (mean half of the peak); an engine computes 3,300 prompt tokens/s and takes 40 ms for a step.

    python -m bench.traces.pools FOLDER
    python -m bench.traces.pools FOLDER --gpus 6
    python -m bench.traces.pools FOLDER --fixed 2 3

`--gpus`: the nodes have so many, for both pools. `--most`: `max` of the prefill and of the decode pool. `--fixed`:
pools that are not scaled. FOLDER holds `azure_2023_conv.csv`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from bench.traces.autoscaling import STARTUP_S
from stoker.operator.domain.autoscaling.decision import Limits
from stoker.operator.domain.autoscaling.prediction import Goals
from stoker.operator.domain.autoscaling.step_curve import StepCurve
from testing.clocked.pair_fleet import ROLES, PairResult, PairSettings, simulate_pair
from testing.clocked.replica import EngineSettings
from testing.clocked.trace import TracedRequest, read_trace, repeated

CURVE = StepCurve(base_s=0.04, prompt_token_s=3e-4, decode_token_s=4e-4)
GOALS = Goals(2.0, 0.15)
BEGIN = 1, 2
"""Replicas at the beginning."""


def wave(at_s: float) -> float:
    """The share of the trace's rate: a sine over half an hour whose mean is half of its peak."""
    return 0.5 - 0.5 * math.cos(2 * math.pi * at_s / 1800)


def requests_of(folder: Path, seconds: float) -> list[TracedRequest]:
    """The first seconds of the trace at its changing rate."""
    return repeated(read_trace(folder / "azure_2023_conv.csv"), seconds, wave)


def main() -> None:
    """Serve the trace once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=1800.0, help="length of the trace (default 1800)")
    parser.add_argument("--gpus", type=int, help="GPUs of the nodes, one for each replica (default: enough)")
    parser.add_argument(
        "--most", type=int, nargs=2, default=(16, 16), metavar=("PREFILL", "DECODE"), help="max of each"
    )
    parser.add_argument("--fixed", type=int, nargs=2, metavar=("PREFILL", "DECODE"), help="pools that are not scaled")
    arguments = parser.parse_args()
    goals = Goals(GOALS.first_token_s, None), Goals(None, GOALS.gap_s)
    prefill, decode = (Limits(1, most, goals=own) for most, own in zip(arguments.most, goals, strict=True))
    settings = PairSettings(
        EngineSettings(CURVE), tuple(arguments.fixed or BEGIN), None if arguments.fixed else (prefill, decode),
        arguments.gpus, startup_s=STARTUP_S,
    )  # fmt: skip
    requests = requests_of(arguments.folder, arguments.seconds)
    result = simulate_pair(settings, requests)
    for role, found in result.decisions:
        print(f"{found.at_s:7.0f} s {role} {found.before} -> {found.after} {found.reason}: {found.message}", flush=True)
    print(json.dumps(measured(result, len(requests))))


def measured(result: PairResult, requests: int) -> dict[str, float]:
    """The figures of one run."""
    found: dict[str, float] = {
        "requests": requests,
        "attained": round(result.attained(GOALS), 4),
        "first_token_attained": round(result.attained(Goals(GOALS.first_token_s, None)), 4),
        "gap_attained": round(result.attained(Goals(None, GOALS.gap_s)), 4),
        "split": round(result.splits / requests, 3),
    }
    for role in ROLES:
        found[f"{role}_hours"] = round(result.replica_s[role] / 3600, 3)
        found[f"{role}_reversals_in_10_min"] = result.most_turns(role)
    return found | {"hours": round(sum(result.replica_s.values()) / 3600, 3)}


if __name__ == "__main__":
    main()
