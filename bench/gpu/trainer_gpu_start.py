"""The first step of a trainer in a fresh process, by what is compiled already: T1 with two layers on one GPU.

    python -m bench.gpu.trainer_gpu_start
    STOKER_BENCH_SITE=/opt/flash python -m bench.gpu.trainer_gpu_start empty triton filled

    empty     the process compiles all kernels
    triton    Triton's are there, those of flash-attn-4 are compiled
    filled    both are there

Each row is one run of `trainer_gpu.py`; the rows behind `empty` find what it left. STOKER_BENCH_SITE names a folder
with flash-attn-4. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS = ("empty", "triton", "filled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=120.0, help="for one row")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(ROWS):
        parser.error(f"unknown rows {sorted(unknown)}; there are {', '.join(ROWS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        for row in arguments.rows:
            if row == "triton":
                shutil.rmtree(Path(cache, "flash-attn"), ignore_errors=True)
            results[row] = first_step(arguments, Path(cache))
            print(json.dumps({row: results[row]}), flush=True)
            (arguments.out / "trainer_start.json").write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


def first_step(arguments: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Run three steps; return the seconds of the first one, and of those behind it."""
    variant = "" if arguments.attention == "auto" else f":{arguments.attention}"
    command = [f"T1{variant}", "--gpus", "1", "--layers", str(arguments.layers), "--steps", "3"]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache / "triton")}
    try:
        done = subprocess.run(
            [sys.executable, "bench/gpu/trainer_gpu.py", *command],
            env=environment, stdout=subprocess.PIPE, text=True, timeout=arguments.limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {arguments.limit_s:g} s"}
    found = [line for line in done.stdout.splitlines() if '"step_ms": [' in line]
    if not found:
        return {"error": f"exit code {done.returncode}: {done.stdout[-500:]}"}
    (result,) = json.loads(found[-1])["results"]
    first_ms, *others_ms = result["step_ms"]
    return {
        "attention": result["attention"],
        "init_s": result["init_s"],
        "first_step_s": round(first_ms / 1e3, 2),
        "next_steps_ms": others_ms,
        "flash_kernels": sum(1 for _ in (cache / "flash-attn").rglob("*.o")),
    }


if __name__ == "__main__":
    main()
