"""P7: a server under HTTP load, with a time line of its steps: server and client as processes of one machine.

    python -m bench.gpu.serve_timeline P7a P7b P7c P7d --out DIR            # the 8B shape on one GPU
    python -m bench.gpu.serve_timeline P7a --shape tiny --device cpu --count 8
    python -m bench.gpu.serve_timeline --read DIR/timeline.jsonl DIR/load.json

Writes random weights, starts `python -m stoker.engine`, runs `bench.gpu.serve_load` against it as soon as it is ready,
and prints the client's figures; then, for each workload, the steps by class (median and p99 of every part), the slowest
steps and gaps of the device, and the requests' waits. `serve.json` holds all of it. Of several data ranks the steps of
all are counted together, and times add up over their devices.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.engine_gpu_start import first_token, free_port, get, set_fields, wait_until_ready
from bench.gpu.model_shapes import LLAMA31_8B, QWEN3_06B, QWEN3_30B_A3B
from bench.gpu.random_model import make_random_folder
from bench.gpu.serve_load import WORKLOADS, spread

TINY = replace(
    LLAMA31_8B, vocab_size=4096, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip
SHAPES = {"8b": LLAMA31_8B, "0.6b": QWEN3_06B, "30b-a3b": QWEN3_30B_A3B, "tiny": TINY}
PARTS = (
    ("plan", "begun", "planned"),
    ("build", "planned", "built"),
    ("submit", "built", "submitted"),
    ("wait", "waiting", "waited"),
    ("take", "waited", "taken"),
    ("send", "taken", "sent"),
)
"""(name, first moment, last moment) of a step's parts on the host."""
SIZES = (64, 128, 256, 384, 512, 640, 1024, 2048)
SLOWEST = 12
MOMENTS = ("arrival_s", "queued_s", "scheduled_s", "first_token_s")
"""Of a request inside the server."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--read", nargs=2, type=Path, metavar=("TIMELINE", "LOAD"), help="only sum up earlier files")
    parser.add_argument("--folder", type=Path, help="the model's; made if it does not exist (default: a temporary one)")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--count", type=int, help="requests of each workload, to try the script out")
    parser.add_argument("--settle-s", type=float, default=0.0, help="pause between ready and the first request")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=JSON", help="of the engine's configuration"
    )
    parser.add_argument("--limit-s", type=float, default=180.0)
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    arguments = parser.parse_args()
    if arguments.read:
        timeline, load = arguments.read
        report(read_lines(timeline), json.loads(load.read_text()))
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as scratch:
        folder = arguments.folder or Path(scratch, "model")
        if not folder.exists():
            make_random_folder(folder, SHAPES[arguments.shape], arguments.layers)
        serve(arguments, folder, Path(scratch))


def serve(arguments: argparse.Namespace, folder: Path, scratch: Path) -> None:
    out: Path = arguments.out
    port, timeline = free_port(), scratch / "timeline.jsonl"
    config = configuration(folder, arguments.device, port, timeline, arguments.set)
    file = scratch / "config.json"
    file.write_text(json.dumps(config))
    begin = time.monotonic()
    with (out / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "stoker.engine", "--config", str(file)], stdout=log, stderr=log
        )  # fmt: skip
        try:
            ready_s = wait_until_ready(port, server, begin, arguments.limit_s)
            first_s = first_token(port, begin)
            print(
                f"ready {ready_s:.2f} s, first token {first_s:.2f} s, {get(port, '/status')['startup_s']}", flush=True
            )
            time.sleep(arguments.settle_s)
            run_load(arguments, port, out / "load.json")
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    load = json.loads((out / "load.json").read_text())
    files = sorted(scratch.glob(f"{timeline.name}*"))  # one for each of several data ranks
    (out / timeline.name).write_bytes(b"".join(file.read_bytes() for file in files))
    found = report(read_lines(out / timeline.name), load)
    (out / "serve.json").write_text(json.dumps({"ready_s": ready_s, "first_token_s": first_s, **found}, indent=1))


def configuration(folder: Path, device: str, port: int, timeline: Path, given: Sequence[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": port},
        "device": device,
        "model": {"path": str(folder), "names": ["m"]},
        "scheduler": {"max_model_len": 8192},
        "timeline": str(timeline),
    }
    set_fields(config, given)
    return config


def run_load(arguments: argparse.Namespace, port: int, out: Path) -> None:
    """Run the client workload by workload, and add the processor seconds of front and core."""
    results = {}
    for name in arguments.workloads:
        before = processor_seconds(port)
        more = ["--count", str(arguments.count)] if arguments.count else []
        vocab = str(min(SHAPES[arguments.shape].vocab_size, 32000))
        places = ["--port", str(port), "--vocab", vocab, "--out", str(out)]
        subprocess.run([sys.executable, "-m", "bench.gpu.serve_load", name, *places, *more], check=True)
        used = {key: round(value - before[key], 2) for key, value in processor_seconds(port).items()}
        results[name] = json.loads(out.read_text())[name] | {"processor_s": used}
    out.write_text(json.dumps(results, indent=1))


def processor_seconds(port: int) -> dict[str, float]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    names = {"process_cpu_seconds_total": "front", "stoker_core_process_cpu_seconds_total": "core"}
    return {names[line.split()[0]]: float(line.split()[1]) for line in lines if line.split()[0] in names}


# The summary.


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def report(lines: Sequence[Mapping[str, Any]], load: Mapping[str, Any]) -> dict[str, Any]:
    """Print a summary of each workload, and return it."""
    found: dict[str, Any] = {}
    began_s = sorted(client["began_s"] for client in load.values())
    for name, client in load.items():
        end_s = min([client["ended_s"] + 1, *(next_s for next_s in began_s if next_s > client["began_s"])])
        inside = [line for line in lines if client["began_s"] <= time_of(line) < end_s]
        steps = [line for line in inside if "step" in line]
        requests = [line for line in inside if "request" in line]
        captures = [line for line in inside if "capture" in line]
        found[name] = {
            "client": client,
            "classes": classes(steps),
            "requests": waits(requests),
            "captures_between": len(captures),
            "first_tokens": first_tokens(client.get("exchanges", ()), requests),
        }
        show(name, found[name], steps)
    return found


def time_of(line: Mapping[str, Any]) -> float:
    return float(line.get("begun") or line.get("capture") or line.get("arrival_s") or 0.0)


def class_of(step: Mapping[str, Any]) -> str:
    if not step["prompts"]:
        return f"decode {step.get('way', '')}"
    size = next((size for size in SIZES if step["tokens"] <= size), "more")
    return f"mixed <={size} {step.get('way', '')}"


def classes(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_class: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for step in steps:
        by_class[class_of(step)].append(step)
    found = {}
    for name, some in sorted(by_class.items()):
        parts = {part: spread([one[last] - one[first] for one in some]) for part, first, last in PARTS}
        device = {key: spread([one.get(key, 0.0) / 1000 for one in some]) for key in ("device_ms", "device_idle_ms")}
        whole = spread([one["waited"] - one["begun"] for one in some])
        tokens = sum(one["tokens"] for one in some) / len(some)
        found[name] = {"steps": len(some), "mean_tokens": round(tokens, 1), "whole": whole, **device, **parts}
    return found


def waits(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    parts = (
        ("front_to_core", "arrival_s", "queued_s"), ("queue", "queued_s", "scheduled_s"),
        ("prefill", "scheduled_s", "first_token_s"), ("first_token", "arrival_s", "first_token_s"),
    )  # fmt: skip
    whole = [one for one in requests if all(one.get(key) is not None for _, *keys in parts for key in keys)]
    return {name: spread([one[last] - one[first] for one in whole]) for name, first, last in parts} if whole else {}


def first_tokens(exchanges: Sequence[Sequence[float]], requests: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Return when the client saw the first tokens, the latest first: milliseconds from its sending, by part.

    Client and server share the machine's clock. Requests are taken to have arrived in the order of their sending.
    """
    arrived = sorted((one for one in requests if one["first_token_s"] is not None), key=lambda one: one["arrival_s"])
    if len(arrived) != len(exchanges):
        return []
    found = []
    for (sent_s, first_s), one in zip(sorted(exchanges), arrived, strict=True):
        moments = [sent_s, *(one[key] for key in MOMENTS), first_s]
        parts = zip(("to_front", "to_core", "queue", "steps", "to_client"), moments, moments[1:], strict=False)
        times = {part: 1000 * (last - first) for part, first, last in parts}
        found.append({"all": 1000 * (first_s - sent_s)} | times | {"cached": one["cached_tokens"]})
    return sorted(found, key=lambda one: -one["all"])


def show(name: str, found: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> None:
    client = found["client"]
    shown = {key: value for key, value in client.items() if not key.endswith("_s") and key != "exchanges"}
    print(f"\n== {name}: {json.dumps(shown)}")
    seconds = client["ended_s"] - client["began_s"]
    print(
        f"   {client['output_tokens_per_s']} tokens/s, processor seconds {client.get('processor_s')}, {seconds:.1f} s; "
        f"graphs captured between steps: {found['captures_between']}"
    )
    print(
        "   requests (ms p50/p99): " + ", ".join(f"{part} {brief(value)}" for part, value in found["requests"].items())
    )
    columns = ["device_ms", "device_idle_ms", "whole", *(part for part, _, _ in PARTS)]
    print(
        f"   {'class (ms p50/p99)':26s}{'steps':>7s}{'tokens':>8s}"
        + "".join(f"{column[:11]:>13s}" for column in columns)
    )
    for kind, row in found["classes"].items():
        print(
            f"   {kind:26s}{row['steps']:7d}{row['mean_tokens']:8.0f}"
            + "".join(f"{brief(row[column]):>13s}" for column in columns)
        )
    for one in found["first_tokens"][:SLOWEST]:
        print("   late: " + " ".join(f"{part} {value:.1f}" for part, value in one.items()))
    for part in ("to_front", "to_core", "queue", "steps", "to_client") if found["first_tokens"] else ():
        print(f"   first token, {part}: {brief(spread([one[part] / 1000 for one in found['first_tokens']]))}")
    for step in sorted(steps, key=lambda step: step["planned"] - step["waited"])[:SLOWEST]:
        parts = " ".join(f"{part} {1000 * (step[last] - step[first]):.1f}" for part, first, last in PARTS)
        shape = f"{step.get('way')} {step.get('padded_tokens')}/{step.get('padded_decodes')}"
        device = f"device {step.get('device_ms', 0):.1f} idle {step.get('device_idle_ms', 0):.1f}"
        at = step["begun"] - client["began_s"]
        print(
            f"   slow: at {at:.2f} s: {step['tokens']} tokens, {step['decodes']}+{step['prompts']} as {shape}: "
            f"{device} {parts}"
        )
    pauses = [max((step[last] - step[first], part) for part, first, last in PARTS if part != "wait") for step in steps]
    print(
        f"   longest work of the host: {', '.join(f'{part} {1000 * took:.1f}' for took, part in sorted(pauses)[-6:])}"
    )
    print(f"   device idle {sum(step.get('device_idle_ms', 0) for step in steps) / 1000:.2f} s, "
          f"busy {sum(step.get('device_ms', 0) for step in steps) / 1000:.2f} s", flush=True)  # fmt: skip


def brief(values: Mapping[str, float]) -> str:
    return f"{values['p50']:.1f}/{values['p99']:.1f}"


if __name__ == "__main__":
    main()
