"""The load that an engine reports, for tests of the autoscaler."""

from __future__ import annotations

from typing import Any

from stoker.operator.domain.autoscaling.load_report import LoadReport, read_load
from stoker.pod.histogram import Histogram


def load(arrived: int, ended: int, computed: int = 800, **changes: Any) -> dict[str, Any]:
    """The `load` field of an engine: requests of 1,000 tokens with 50 answered each, 5 in 10 s.

    Args:
        computed: prompt tokens of each request that are computed here.
    """
    hists = {name: Histogram() for name in ("prompt", "uncached", "output", "first_token_s", "token_gap_s")}
    for name, value, count in (
        ("prompt", 1000, ended), ("uncached", computed, ended), ("output", 50, ended),
        ("first_token_s", 0.4, ended), ("token_gap_s", 0.02, 49 * ended),
    ):  # fmt: skip
        if count:
            hists[name].add(value, count)
    numbers = {
        "arrived": arrived, "first_tokens": ended, "generated": 50 * ended, "steps": 50 * ended,
        "step_tokens": (computed + 49) * ended,
        "busy_s": 50 * ended * 0.01 + computed * ended * 5e-5 + 49 * ended * 2e-4,
        "running": 1, "waiting": 0, "owned_tokens": 1000, "total_tokens": 64_000, "max_requests": 64,
        "max_batch_tokens": 2048,
    }  # fmt: skip
    return {**numbers, **{name: found.to_wire() for name, found in hists.items()}, **changes}


def report(arrived: int, ended: int) -> LoadReport:
    found = read_load({"load": load(arrived, ended)})
    assert found is not None
    return found
