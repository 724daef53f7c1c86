"""Prefill and decode on two GPUs of one host: the link, the hand-over, streams beside long prompts, killed engines.

    python -m bench.gpu.pd_gpu link serve --out DIR            # Qwen3-8B's shape, random weights
    python -m bench.gpu.pd_gpu serve --shape tiny --device cpu --count 4 --out DIR

  link        `bench.gpu.pd_gpu_link`: milliseconds of 8,192 and 32,768 tokens, checksum and copy included
  namespaces  whether memory of a process in other PID and IPC namespaces can be mapped
  serve       a prefill engine on the first GPU and a decode engine on the second, asked over HTTP:
    idle        time to the first token, split minus whole at the decode engine and minus whole at the prefill engine,
                whose GPU computes the prompt in both; gap of the hand-over, as the client sees it and as the decode
                engine measures it
    beside      gaps of 64 streams: alone, with prompts of 8,192 tokens by the prefill engine, and with the same prompts
                computed beside the streams
    kill        through the router: streams while one engine is killed by signal 9; lost and short answers, the longest
                gap, and the time until the dead process's GPU memory is free; each side once

Every row is a process with a limit; a row that fails leaves the others. `pd_gpu.json` holds all figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu.model_shapes import LLAMA31_8B, QWEN3_06B, QWEN3_8B
from bench.gpu.pd_gpu_engines import Engines
from bench.gpu.pd_gpu_streams import Ask, Stream, gaps_of, run_all
from bench.gpu.random_model import make_random_folder
from bench.gpu.serve_load import spread

TINY = replace(
    LLAMA31_8B, vocab_size=4096, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16,
)  # fmt: skip
SHAPES = {"qwen3-8b": QWEN3_8B, "0.6b": QWEN3_06B, "tiny": TINY}
LIMITS_S = {"link": 150.0, "namespaces": 60.0, "serve": 240.0}
WAYS = ("decode_alone", "prefill_alone", "split")
"""Who computes a prompt when idle: the engine that answers, the prefill engine that then answers, or both together."""


def main() -> None:
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("this took too long"))
    if arguments.row:
        show(arguments.row, measure(arguments.row, arguments))
        return
    results: dict[str, Any] = {}
    for row in arguments.rows:
        results |= in_own_process(row, arguments)
        (arguments.out / "pd_gpu.json").write_text(json.dumps(results, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(LIMITS_S))
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus", default="0,1", help="of the prefill and of the decode engine")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--long", type=int, default=8192, help="tokens of a long prompt")
    parser.add_argument("--count", type=int, default=12, help="prompts of each kind when idle")
    parser.add_argument("--warm-s", type=float, default=8.0, help="of requests before prompts of a length are timed")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each phase with streams")
    parser.add_argument("--cache-gib", type=float, help="of each engine (default: what its GPU has)")
    parser.add_argument("--parts", nargs="+", default=["idle", "beside", "kill"], help="of `serve`")
    parser.add_argument("--victims", default="pd", help="engines that are killed, in this order")
    parser.add_argument("--folder", type=Path, help="of the model; made if it does not exist")
    parser.add_argument("--limit-s", type=float, help="of each row")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    return parser.parse_args()


def in_own_process(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a row and collect the lines that it prints: one JSON object for each part."""
    command = [sys.executable, "-m", "bench.gpu.pd_gpu", "--row", row, *sys.argv[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    limit = threading.Timer(arguments.limit_s or LIMITS_S[row], process.terminate)
    limit.start()
    parts: dict[str, Any] = {}
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                parts.update(json.loads(line))
    finally:  # also where this process is told to end
        process.terminate()
        process.wait()
        limit.cancel()
    return parts or {row: {"failed": f"exit {process.returncode}"}}


def measure(row: str, arguments: argparse.Namespace) -> Any:
    gpus = tuple(arguments.gpus.split(","))
    if row == "serve":
        return serve(arguments, gpus[0], gpus[-1])
    from bench.gpu.pd_gpu_link import measure_link, measure_namespaces

    pair = gpus[0], gpus[-1]
    return measure_link(pair) if row == "link" else measure_namespaces(pair)


# Engines over HTTP.


def serve(arguments: argparse.Namespace, prefill_gpu: str, decode_gpu: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").exists() else None) as scratch:
        folder = arguments.folder or Path(scratch, "model")
        if not folder.exists():
            make_random_folder(folder, SHAPES[arguments.shape])
        engines = Engines(folder, Path(scratch), arguments.out, arguments.device, arguments.cache_gib)
        try:
            engines.start("p", "prefill", prefill_gpu)
            engines.start("d", "decode", decode_gpu)
            ready_s = engines.wait_until_ready()
            show("ready", {"s": ready_s, "transports": engines.status("d")["transfer"]["transports"]})
            load = Load(arguments, engines)
            for name in arguments.parts:
                show(name, getattr(load, name)())
            return {"outcomes": engines.status("p")["transfer"]["helps"]}
        finally:
            engines.close()


def show(name: str, value: Any) -> None:
    print(json.dumps({name: value}), flush=True)


class Load:
    """The phases of requests."""

    def __init__(self, arguments: argparse.Namespace, engines: Engines) -> None:
        self.arguments, self.engines = arguments, engines
        self.chance = random.Random(0)
        self.vocab = min(SHAPES[arguments.shape].vocab_size, 32000)
        self.helper = engines.endpoint("p")

    def prompt(self, tokens: int) -> list[int]:
        return [self.chance.randrange(self.vocab) for _ in range(tokens)]

    def ask(self, tokens: int, output: int, *, split: bool, port: int | None = None) -> Ask:
        return Ask(port or self.engines.port("d"), self.prompt(tokens), output, self.helper if split else "")

    # Idle.

    def idle(self) -> dict[str, Any]:
        """One request at a time: at either engine alone, and at the decode engine with the prefill engine."""
        found: dict[str, Any] = {}
        for tokens in (self.arguments.long // 4, self.arguments.long):
            self.warm(tokens)
            firsts: dict[str, list[float]] = {way: [] for way in WAYS}
            longest = []
            for _ in range(self.arguments.count):
                for way in self.chance.sample(WAYS, len(WAYS)):  # what ran before leaves a GPU warm
                    (stream,) = run_all([self.ask_by(way, tokens)])
                    firsts[way].append(stream.first_s)
                    longest += [max(gaps_of([stream]))] if way == "split" else []
            middle = {way: 1000 * median(times) for way, times in firsts.items()}
            found[str(tokens)] = {
                **{f"ttft_{way}_ms": round(value, 2) for way, value in middle.items()},
                "difference_ms": round(middle["split"] - middle["decode_alone"], 2),
                "difference_same_gpu_ms": round(middle["split"] - middle["prefill_alone"], 2),
                "longest_gap_ms": spread(longest),
            }  # fmt: skip
        transfer = self.engines.status("d")["transfer"]
        sender = self.engines.status("p")["transfer"]
        found["handover_ms"] = round(1000 * (transfer["handover_s"] or 0), 2)
        found["outcomes"] = transfer["outcomes"]
        found["link"] = {name: sender.get(name) for name in ("transport", "bytes_per_s", "link_bytes_per_s")}
        found["equal_answers"] = self.equal_answers()
        return found

    def warm(self, tokens: int) -> None:
        """Let both engines capture the graphs that such prompts need."""
        until_s = time.monotonic() + self.arguments.warm_s
        while time.monotonic() < until_s:
            for way in WAYS:
                run_all([self.ask_by(way, tokens)])

    def ask_by(self, way: str, tokens: int) -> Ask:
        port = self.engines.port("p") if way == "prefill_alone" else None
        return self.ask(tokens, 48, split=way == "split", port=port)

    def equal_answers(self) -> str:
        """Greedy answers of both ways that are the same text, of all."""
        same, count = 0, 6
        for _ in range(count):
            prompt = self.prompt(self.arguments.long // 8)
            texts = []
            for helper in ("", self.helper):
                (stream,) = run_all([Ask(self.engines.port("d"), prompt, 32, helper)])
                texts.append(stream.text)
                prompt = list(prompt)
            same += texts[0] == texts[1]
        return f"{same}/{count}"

    # Beside.

    def beside(self) -> dict[str, Any]:
        """Gaps of running streams, with long prompts and without."""
        return {name: asyncio.run(self._beside(way)) for name, way in
                (("warm", None), ("alone", None), ("split", True), ("colocated", False))}  # fmt: skip

    async def _beside(self, way: bool | None) -> dict[str, Any]:
        seconds = self.arguments.seconds if way is not None else self.arguments.seconds / 2
        tokens = int(seconds / 0.005)
        background = [Stream(self.ask(256, tokens, split=False)) for _ in range(self.arguments.streams)]
        tasks = [asyncio.ensure_future(one.run()) for one in background]
        while any(len(one.stamps) < 8 for one in background):
            await asyncio.sleep(0.02)
        begun_s, prompts = time.monotonic(), []
        while time.monotonic() - begun_s < seconds:
            if way is not None:
                prompts.append(Stream(self.ask(self.arguments.long, 16, split=way)))
                tasks.append(asyncio.ensure_future(prompts[-1].run()))
            await asyncio.sleep(1.0)
        ended_s = time.monotonic()
        for one in background:
            one.abort()
        await asyncio.gather(*tasks)
        found = {"gap_ms": spread(gaps_of(background, begun_s, ended_s)), "prompts": len(prompts)}
        done = [one for one in prompts if one.complete]
        if done:
            found |= {"prompt_ttft_ms": spread([one.first_s for one in done]), "answered": len(done)}
        return found

    # Kills.

    def kill(self) -> dict[str, Any]:
        """Kill the sides one by one under load through the router, the prefill engine first."""
        self.engines.start_router()
        found: dict[str, Any] = {}
        for victim in self.arguments.victims:
            found[victim] = asyncio.run(self._kill(victim))
            show(f"kill {victim}", found[victim])
            if victim != self.arguments.victims[-1]:
                self.engines.start("p", "prefill", self.engines.gpu("p"))
                self.engines.wait_until_ready()
                self.helper = self.engines.endpoint("p")
        return found

    async def _kill(self, victim: str) -> dict[str, Any]:
        before = self.engines.memory_used()
        port, split_port = self.engines.port("router"), self.engines.port("d")
        streams = [Stream(self.ask(512, 600, split=False, port=port)) for _ in range(self.arguments.streams // 2)]
        if victim == "p":  # the router decides by cost; these are split for certain
            streams += [Stream(self.ask(self.arguments.long, 64, split=True, port=split_port)) for _ in range(6)]
        tasks = [asyncio.ensure_future(one.run()) for one in streams]
        while sum(bool(one.stamps) for one in streams) < len(streams) // 2:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.2)
        killed_s = time.monotonic()
        self.engines.kill(victim)
        freed = asyncio.ensure_future(self.engines.wait_until_free(victim, before, killed_s))
        await asyncio.gather(*tasks)
        lost = [one for one in streams if not one.complete]
        return {
            "requests": len(streams), "lost": len(lost), "reasons": sorted({one.problem for one in lost}),
            "longest_gap_ms": spread([max(gaps_of([one]), default=0.0) for one in streams]),
            "memory_free_after_s": await freed, "used_before_gib": before,
        }  # fmt: skip


if __name__ == "__main__":
    main()
