"""The figures of a bench as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stoker.engine.bench.figures import PLACES

TIMES = {"ttft_ms": "first token", "tpot_ms": "per output token", "e2el_ms": "whole request"}
COLUMNS = ("mean", "min", *PLACES, "max")


def engine_line(about: Mapping[str, Any]) -> str:
    """Return what is measured: the model, how and where it is computed."""
    ranks = about["tensor"] * about["pipeline"]
    threads = f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    place = about["device_name"] or f"the CPU ({threads}{' each' if ranks > 1 else ''})"
    return f"{about['model']} in {about['dtype']} on {f'{ranks} ranks on ' if ranks > 1 else ''}{place}"


def round_line(number: int, found: Mapping[str, Any]) -> str:
    """Return the rates of one round of a throughput bench."""
    rates = f"{found['output_tokens_per_s']:,.10g} output tokens/s, {found['total_tokens_per_s']:,.10g} with input"
    done = f"{found['requests']:,} requests in {found['seconds']:g} s"
    return f"round {number}: {done}, {found['requests_per_s']:,.10g} requests/s, {rates}"


def throughput_end(found: Mapping[str, Any], num_rounds: int) -> Iterator[str]:
    """Yield the lines behind the last round: which is the figure, and what its requests were."""
    if num_rounds > 1:
        yield f"The figure is that of round {num_rounds}: kernels and graphs are made in the first."
    else:
        yield "The figure is that of a first round, in which kernels and graphs are made."
    cached = f", {found['cached_tokens']:,} of them cached" if found["cached_tokens"] else ""
    yield f"It had {found['input_tokens']:,} input tokens{cached}, and {found['output_tokens']:,} output tokens."
    yield from _preempted(found)


def latency_end(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of times, and how many values it rests on."""
    columns = [column for column in COLUMNS if column in found["ttft_ms"]]
    rounds = f"{found['rounds']:,} rounds of {found['batch']:,}"
    yield f"{found['requests']:,} requests in {rounds}, after one that does not count"
    yield " " * 18 + "".join(f"{column:>11}" for column in columns) + "   ms"
    for name, title in TIMES.items():
        if found[name]:
            yield f"{title:<18}" + "".join(f"{found[name][column]:>11,.2f}" for column in columns)
    left_out = [f"{name} needs {needed}" for name, (_, needed) in PLACES.items() if name not in columns]
    if left_out:
        yield f"Too few rounds for further percentiles: {', '.join(left_out)}."
    yield from _preempted(found)


def _preempted(found: Mapping[str, Any]) -> Iterator[str]:
    if found["preemptions"]:
        yield f"{found['preemptions']:,} preemptions: the cache was too small for the requests of one step."
