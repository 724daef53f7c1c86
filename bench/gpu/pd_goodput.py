"""Goodput of two engines on two GPUs, replaying a part of a trace of conversations: colocated, split, and as predicted.

    python -m bench.gpu.pd_goodput --trace TRACE.jsonl --speed 1.0 --modes colocated split auto --out DIR
    python -m bench.gpu.pd_goodput --trace TRACE.jsonl --probe 1.0 --modes colocated --out DIR    # looks for a speed

  colocated   both engines answer whole requests
  split       one engine computes every prompt, the other one answers
  auto        the same engines; the router splits a request where it predicts that to be faster

The first `--slice-s` seconds of the trace, `speed` times as fast, are sent by `stoker bench serve`. Each mode has fresh
engines, warm by 20 other seconds, and the same requests. A request counts where its first token came within `--ttft-ms`
and its tokens within `--gap-ms`; prompts of which more than `--apart` tokens were never sent before are counted apart.
With `--probe` a first part, of the first mode, decides the speed: that at which about nine of ten requests would count.
`pd_goodput.json` holds all figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.model_shapes import QWEN3_8B
from bench.gpu.pd_gpu import TINY
from bench.gpu.pd_gpu_engines import Engines
from bench.gpu.random_model import make_random_folder
from bench.gpu.trace_goodput import Goals, Line, first_lines, shares, speed_for

MODES = ("colocated", "split", "auto")
WARM_S, PROBE_S = 20.0, 60.0
"""Seconds of the trace for graphs to be captured, and to look for a speed."""
WARM_SPEED = 0.5
"""The least; what is warm does not depend on it."""
TIMEOUT_S = 120.0
"""Longest answer; a request that exceeds it has failed."""


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    speed, probe = arguments.speed, arguments.probe
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as scratch:
        folder = arguments.folder or Path(scratch, "model")
        if not folder.exists():
            shape = TINY if arguments.device == "cpu" else QWEN3_8B
            make_random_folder(folder, replace(shape, max_position_embeddings=arguments.max_model_len))
        for mode in arguments.modes:
            found[mode] = measure(mode, arguments, folder, Path(tempfile.mkdtemp(dir=scratch)), speed, probe)
            speed, probe = found[mode]["speed"], None
            print(json.dumps({mode: found[mode]}), flush=True)
            (arguments.out / "pd_goodput.json").write_text(json.dumps(found, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--slice-s", type=float, default=240.0, help="seconds of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="2 is twice as fast")
    parser.add_argument("--probe", type=float, help="speed of a first part, which decides that of the rest")
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--gap-ms", type=float, default=25.0)
    parser.add_argument("--apart", type=int, default=40_000, metavar="TOKENS")
    parser.add_argument("--max-model-len", type=int, default=131_072)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", default="0,1")
    parser.add_argument("--cache-gib", type=float, help="of each engine (default: what its GPU has)")
    parser.add_argument("--folder", type=Path, help="of the model; made if it does not exist")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    return parser.parse_args()


def measure(
    mode: str, arguments: argparse.Namespace, folder: Path, scratch: Path, speed: float, probe: float | None
) -> dict[str, Any]:
    """The figures of a mode. `probe`: speed of a first part, which decides that of the rest."""
    gpus = arguments.gpus.split(",")
    engines = Engines(
        folder, scratch, arguments.out, arguments.device, arguments.cache_gib, max_model_len=arguments.max_model_len
    )
    roles = ("colocated", "colocated") if mode == "colocated" else ("prefill", "decode")
    try:
        for name, role, gpu in zip("pd", roles, (gpus[0], gpus[-1]), strict=True):
            engines.start(name, role, gpu)
        found: dict[str, Any] = {"ready_s": engines.wait_until_ready(need_peer=mode != "colocated")}
        engines.start_router(dict(zip("pd", roles, strict=True)), module=router_of(mode))
        replay(engines, arguments, scratch, WARM_S, max(speed, WARM_SPEED), seed=3)
        if probe is not None:
            found["probe"] = replay(engines, arguments, scratch, PROBE_S, probe, seed=2)
            print(json.dumps({f"{mode}, probe": found["probe"]}), flush=True)  # what follows takes minutes
            speed = speed_for(probe, found["probe"]["share"])
        found |= replay(engines, arguments, scratch, arguments.slice_s, speed, seed=1)
        if mode != "colocated":
            transfer = engines.status("d")["transfer"]
            found |= {"outcomes": transfer["outcomes"], "fallbacks": transfer["fallbacks"]}
        return found
    finally:
        engines.close()


def router_of(mode: str) -> str:
    return "bench.gpu.split_router" if mode == "split" else "stoker.router"


def replay(
    engines: Engines, arguments: argparse.Namespace, scratch: Path, slice_s: float, speed: float, seed: int
) -> dict[str, Any]:
    """Send the first part of the trace and return its figures."""
    lines = first_lines(arguments.trace.read_text().splitlines(), slice_s, arguments.max_model_len)
    part, records = scratch / "part.jsonl", scratch / "records.jsonl"
    part.write_text("".join(line.text + "\n" for line in lines))
    command = [
        sys.executable, "-m", "stoker.cli.load", "serve", f"http://127.0.0.1:{engines.port('router')}",
        "--trace", part, "--trace-speed", speed, "--seed", seed, "--timeout-s", TIMEOUT_S, "--records", records,
        "--vocabulary", 4000, "--json",
    ]  # fmt: skip
    with (arguments.out / "pd_goodput_client.log").open("ab") as log:
        ran = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=log, check=False, text=True)
    if not ran.stdout.startswith("{"):
        raise SystemExit(f"stoker bench serve ended with {ran.returncode}")
    about = json.loads(ran.stdout)
    return {"speed": speed, **figures_of(lines, records, arguments), **{name: about[name] for name in TOLD}}


TOLD = (
    "requests", "failed", "errors", "duration_s", "most_at_once", "input_tokens", "cached_tokens", "output_tokens",
    "ttft_ms", "tpot_ms", "gap_ms", "late_ms",
)  # fmt: skip


def figures_of(lines: list[Line], records: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    goals = Goals(arguments.ttft_ms, arguments.gap_ms, arguments.apart)
    return shares(lines, [json.loads(text) for text in records.read_text().splitlines()], goals)


if __name__ == "__main__":
    main()
