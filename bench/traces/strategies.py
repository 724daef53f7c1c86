"""The router's strategies on the Mooncake conversation trace in virtual time: first tokens, and requests within goals.

The engine's real scheduler, blocks and load reports, and the router's real policies. 100 % of load is the rate at which
the pool works the slice off, by its tokens, when all of it waits from the beginning (`leastPending`); the slice's
arrivals are stretched to a share of it. Prompts share what the trace says.

    python -m bench.traces.strategies TRACES --requests 1500 --replicas 4
    python -m bench.traces.strategies TRACES --begin 2000 --loads 0.95 1.27 --strategies cacheAware roundRobin
    python -m bench.traces.strategies TRACES --requests 1000 --admission
    python -m bench.traces.strategies TRACES --trace mooncake_synthetic --requests 500 --ranks-as-one 4

With `--ranks-as-one` so many engines are data ranks of one pod, whose report does not tell them apart; with 1, the
default, they are choices of their own: engines as well as ranks that are named.

With `--admission` the router refuses at once what it predicts to miss the goal of the first token, as with a class that
has it as its `ttftMs`. Refused requests count as not within the goals.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.traces.autoscaling import CURVE
from stoker.operator.domain.autoscaling.prediction import Goals
from stoker.router.request_class import RequestClass
from testing.clocked.fleet import FleetResult, FleetSettings, simulate
from testing.clocked.replica import EngineSettings
from testing.clocked.trace import TracedRequest, conversations, read_trace

LOADS = (0.3, 0.7, 0.95, 1.27)
"""The last one is more than the pool can do."""
STRATEGIES = ("cacheAware", "leastPending", "powerOfTwo", "roundRobin", "random")
"""`locality` is `leastPending` where all engines are equally near."""
TURNS = 8
"""Of each of the `conversations`."""
GOALS = Goals(first_token_s=8.0, gap_s=0.2)


def main() -> None:
    """Compare the strategies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--trace", default="mooncake_conversation", help="a .jsonl file of the folder, or `conversations`"
    )
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--begin", type=int, default=0, help="first request of the slice")
    parser.add_argument("--loads", type=float, nargs="*", default=list(LOADS), help="shares of the pool's capacity")
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES))
    parser.add_argument("--ranks-as-one", type=int, default=1, help="data ranks that a router does not tell apart")
    parser.add_argument("--rate", type=float, help="requests/s that count as 100 %% (measured by default)")
    parser.add_argument("--admission", action="store_true", help="refuse what is predicted to miss its first token")
    arguments = parser.parse_args()
    found = sliced(trace_of(arguments), arguments.begin, arguments.requests)
    settings = FleetSettings(
        EngineSettings(CURVE, kv_tokens=400_000), replicas=arguments.replicas, ranks_as_one=arguments.ranks_as_one
    )
    rate = arguments.rate or capacity(settings, found)
    print(f"100 % is {rate:.2f} requests/s", flush=True)
    if arguments.admission:
        settings = replace(settings, classes=(RequestClass(name="all", ttft_goal_s=GOALS.first_token_s),))
    rows = [
        row(settings, name, at_rate(found, rate * load), load)
        for load in arguments.loads
        for name in arguments.strategies
    ]
    print(json.dumps({"requests": len(found), "replicas": settings.replicas, "capacity": rate, "rows": rows}))


def trace_of(arguments: argparse.Namespace) -> list[TracedRequest]:
    """The requests of the trace that was asked for."""
    if arguments.trace == "conversations":
        return conversations(arguments.requests // TURNS, TURNS, rate=1.0)
    return read_trace(arguments.folder / f"{arguments.trace}.jsonl")


def sliced(requests: Sequence[TracedRequest], begin: int, count: int) -> list[TracedRequest]:
    """The requests from a place on, from time 0."""
    found = requests[begin : begin + count]
    return [replace(request, at_s=request.at_s - found[0].at_s) for request in found]


def capacity(settings: FleetSettings, requests: Sequence[TracedRequest]) -> float:
    """Requests per second that the pool works off while there are always more, by tokens: short ones end first."""
    result = simulate(settings, [replace(request, at_s=0.0) for request in requests])
    ended = sorted((found.last_s or math.inf, found.request.prompt + found.request.output) for found in result.served)
    enough = 0.8 * sum(tokens for _, tokens in ended)  # at the end not all replicas are busy
    done = itertools.accumulate(tokens for _, tokens in ended)
    end_s = next(at_s for (at_s, _), tokens in zip(ended, done, strict=True) if tokens >= enough)
    return 0.8 * len(ended) / end_s


def at_rate(requests: Sequence[TracedRequest], rate: float) -> list[TracedRequest]:
    """The slice with its arrivals stretched to a mean rate."""
    factor = len(requests) / rate / requests[-1].at_s
    return [replace(request, at_s=request.at_s * factor) for request in requests]


def row(settings: FleetSettings, name: str, requests: Sequence[TracedRequest], load: float) -> dict[str, Any]:
    """One strategy at one load."""
    began = time.process_time()
    result = simulate(replace(settings, policy=name), requests)
    first = sorted(found.first_token_s for found in result.served if found.first_s is not None)
    measured = {
        "load": load,
        "strategy": name,
        "within_goals": round(result.attained(GOALS), 4),
        "refused": len(result.served) - len(first),
        "mean_first_token_s": round(sum(first) / len(first), 3),
        "p50_first_token_s": round(_quantile(first, 0.5), 3),
        "p95_first_token_s": round(_quantile(first, 0.95), 3),
        "computed_share": round(_computed(result), 3),
        "processor_s": round(time.process_time() - began),
    }
    print(measured, flush=True)
    return measured


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[math.ceil(share * len(ordered)) - 1]


def _computed(result: FleetResult) -> float:
    """Prompt tokens that were computed, of those of all requests that were answered."""
    answered = [found for found in result.served if found.first_s is not None]
    return sum(found.uncached for found in answered) / sum(found.request.prompt for found in answered)


if __name__ == "__main__":
    main()
