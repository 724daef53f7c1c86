"""Every bench that runs on a CPU, one after the other.

Each one's last line, JSON, goes to `bench/out/<name>.json`; a table ends it.

    make bench                                       # all
    python bench/run.py checkpoint_save reconcilers  # some

Measure on a quiet machine: the load at the start of each is in its file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE / "out"
Figures = Mapping[str, Any]
Row = tuple[str, str, str, str]
"""Name, measured value, goal, and whether it is met."""


@dataclass(frozen=True)
class Bench:
    """One script, with the figures of its result that stand in the table."""

    name: str
    rows: Callable[[Figures], list[Row]]


def main() -> int:
    """Run the benches; return 0 when every one ran, because a missed goal is a figure and no error."""
    names = [bench.name for bench in BENCHES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default all: {', '.join(names)}")
    chosen = parser.parse_args().names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(names)}")
    OUT.mkdir(exist_ok=True)
    table: list[Row] = []
    failed = []
    for bench in BENCHES:
        if bench.name not in chosen:
            continue
        result = run(bench.name)
        if result is None:
            failed.append(bench.name)
        table += bench.rows(result) if result is not None else [(bench.name, "failed", "", "")]
    show(table)
    return 1 if failed else 0


def run(name: str) -> Figures | None:
    """Return the figures of a script's last line, in the form to be written; None when it failed."""
    print(f"\n=== {name}", flush=True)
    load, begin = os.getloadavg()[0], time.monotonic()
    last = ""
    command = [sys.executable, str(HERE / f"{name}.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent) as script:
        assert script.stdout is not None
        for line in script.stdout:
            if line.strip():
                last = line
            if not line.startswith("{"):
                print(line, end="", flush=True)
    if script.returncode or not last.startswith("{"):
        print(f"{name} ended with code {script.returncode}")
        return None
    figures: dict[str, Any] = json.loads(last)
    seconds = round(time.monotonic() - begin, 1)
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine(), "load_before": round(load, 2), "seconds": seconds}
    (OUT / f"{name}.json").write_text(json.dumps({"about": about, "figures": figures}, indent=1) + "\n")
    return figures


def machine() -> str:
    """Return processor and cores, without names of hosts."""
    processor = platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        models = [line.partition(":")[2].strip() for line in cpu_info.read_text().splitlines() if "model name" in line]
        processor = models[0] if models else processor
    return f"{os.cpu_count()} x {processor}"


def show(table: list[Row]) -> None:
    header: Row = ("what", "measured", "goal", "")
    widths = [max(len(row[column]) for row in (header, *table)) for column in range(4)]
    print()
    for row in (header, *table):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def at_least(what: str, value: float, goal: float, unit: str = "x") -> Row:
    return what, f"{value:.2f} {unit}", f">= {goal:g}", "met" if value >= goal else "MISSED"


def at_most(what: str, value: float, goal: float, unit: str) -> Row:
    return what, f"{value:.1f} {unit}", f"<= {goal:g}", "met" if value <= goal else "MISSED"


def checkpoint_rows(figures: Figures) -> list[Row]:
    return [at_least("checkpoint save against a plain write", figures["ratio"], 0.8)]


def trainer_rows(figures: Figures) -> list[Row]:
    return [
        at_least(
            f"trainer against DDP, {line['precision']}, {line['stoker_tokens_per_s']:.0f} tokens/s", line["ratio"], 1.0
        )
        for line in figures["results"]
    ]


def engine_rows(figures: Figures) -> list[Row]:
    rows = []
    for name, line in figures.items():
        if isinstance(line, Mapping) and "ratio" in line:
            if "llama.cpp" in name:
                rows.append(at_least(f"engine, {name}", line["ratio"], 1.0))
            else:
                rows.append(
                    at_least(
                        f"engine, {name}, against transformers",
                        line["ratio"],
                        1.2 if "16" in name.split(",")[0] else 1.5,
                    )
                )
    return rows


def reconciler_rows(figures: Figures) -> list[Row]:
    every = figures["rest"]["passes"]["all"]
    writes = sum(figures["rest"]["writes"].values()) + sum(figures["restart"]["writes"].values())
    return [
        at_most(f"operator with {figures['jobs']} jobs, resident", figures["resident_mib"], 120, "MiB"),
        ("operator, a pass at rest", f"{every['p50_ms']:.2f} ms", "reported", f"p95 {every['p95_ms']:.2f} ms"),
        (
            "operator, all reports change",
            f"{figures['change']['seconds']:.1f} s",
            "reported",
            f"{figures['change']['writes_per_job']:.2f} writes per job",
        ),
        at_most("operator, writes when nothing changed", writes, 0, ""),
    ]


def quickstart_rows(figures: Figures) -> list[Row]:
    return [at_most("quickstart after set-up", figures["total_s"], 300, "s")]


def link_rows(figures: Figures) -> list[Row]:
    shared, tcp = figures["shared-memory"], figures["tcp"]
    return [
        at_least("blocks over shared memory", shared["link"], 2, "GB/s"),
        at_least("blocks over TCP", tcp["link"], 0.5, "GB/s"),
        at_most("killed writer noticed", max(shared["noticed_ms"], tcp["noticed_ms"]), 50, "ms"),
    ]


def console_rows(figures: Figures) -> list[Row]:
    return [at_most(f"console, {page}: longest frame", line["longest_ms"], 50, "ms") for page, line in figures.items()]


def technique_rows(figures: Figures) -> list[Row]:
    return [
        (
            f"technique {row['technique']}: {row['figure']}" if "figure" in row else f"technique {row['technique']}",
            f"{row['gain']:.2f} x" if "gain" in row else row["why_not"],
            "reported",
            f"off {row['off']}, on {row['on']}" if "gain" in row else "",
        )
        for row in figures["techniques"]
    ]


BENCHES = (
    Bench("checkpoint_save", checkpoint_rows),
    Bench("reconcilers", reconciler_rows),
    Bench("console_frames", console_rows),
    Bench("trainer_vs_ddp", trainer_rows),
    Bench("engine_cpu", engine_rows),
    Bench("techniques", technique_rows),
    Bench("block_links", link_rows),
    Bench("quickstart", quickstart_rows),
)

if __name__ == "__main__":
    sys.exit(main())
