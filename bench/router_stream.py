"""The cost of the router: latency that it adds to the chunks of streams, its CPU time per chunk, and one decision.

python -m bench.router_stream [--streams-per-s 50] [--chunks 50] [--gap-ms 20] [--seconds 20] [--pin 2] [--spread]
    [--json FILE]
python -m bench.router_stream decision

An engine without a model (own process) writes the time into each chunk; one client reads the same load directly,
through a relay that only copies bytes, and through `python -m stoker.router`, in turn (`--rounds`). What the relay adds
is the price of any process between the two on this machine. All clocks are the machine's monotonic one. As a rule all
streams get their chunk at the same time, as from an engine's step: a chunk waits for those before it, and for the
request that begins then. `--spread` begins streams at random times instead.
`--pin` keeps the router on one core of many.

The bars: 50 streams/s add at most 1 ms (p50) and 3 ms (p99), to first tokens and to chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import timeit
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.router_load import Measured, Settings, client
from stoker.router.backend import Timeouts
from stoker.router.backends import Backends
from stoker.router.cache_aware import CacheAware
from stoker.router.load import Load, Peer, SharedStore
from stoker.router.pairs import Pair
from stoker.router.snapshot import BackendEntry, BackendSnapshot, Role
from stoker.router.work import Work, work_of


def cpu_s(pid: int) -> float:
    """User and system time of a process, to the nanosecond."""
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0]) / 1e9


def child(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    """Start an engine or a relay; return it and its port."""
    started = subprocess.Popen(
        [sys.executable, "-m", "bench.router_load", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    return started, int(started.stdout.readline())


def start_router(folder: str, engine_port: int) -> tuple[subprocess.Popen[str], int]:
    """Start a router in front of the engine; return it and its port."""
    port = engine_port + 1 if engine_port < 65000 else engine_port - 1000
    entry = {"url": f"http://127.0.0.1:{engine_port}", "pod_uid": "a"}
    Path(folder, "backends.json").write_text(json.dumps({"version": 1, "backends": [entry]}), encoding="utf-8")
    config = {"deployment": "d", "backends_file": f"{folder}/backends.json", "listen": {"port": port}}
    Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "stoker.router", "--config", f"{folder}/config.json"]
    router = subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True)
    wait_until_ready(port)
    return router, port


@dataclass
class Way:
    """One way to the engine, and what it took."""

    port: int
    pid: int | None = None
    """Of the process on the way; None: there is none."""
    measured: Measured = field(default_factory=Measured)
    used_s: float = 0.0

    def run(self, settings: Settings) -> None:
        before = cpu_s(self.pid) if self.pid else 0.0
        self.measured.add(asyncio.run(client(self.port, settings)))
        self.used_s += cpu_s(self.pid) - before if self.pid else 0.0


def measure(settings: Settings, *, rounds: int, pin: int | None) -> dict[str, float]:
    """Measure the same load directly, through a relay and through the router, in turn."""
    started = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            engine, engine_port = child("engine", "--chunks", str(settings.chunks), "--gap-s", str(settings.gap_s))
            started.append(engine)
            relay, relay_port = child("relay", "--port", str(engine_port))
            started.append(relay)
            router, router_port = start_router(folder, engine_port)
            started.append(router)
            if pin is not None:
                os.sched_setaffinity(router.pid, {pin})
            ways = {
                "direct": Way(engine_port), "relay": Way(relay_port, relay.pid), "router": Way(router_port, router.pid),
            }  # fmt: skip
            for _ in range(rounds):
                for way in ways.values():
                    way.run(settings)
        finally:
            for process in started:
                process.kill()
                process.wait()
    return report(ways, rounds * settings.seconds)


def wait_until_ready(port: int) -> None:
    """Wait until the router has probed the engine.

    Raises:
        TimeoutError: it has not within a minute.
    """
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise TimeoutError("the router is not ready after a minute")


def report(ways: Mapping[str, Way], seconds: float) -> dict[str, float]:
    """Milliseconds that relay and router add, and their processor time."""
    direct, found = ways["direct"].measured.row(), dict[str, float]()
    for name, way in ways.items():
        row, chunks = way.measured.row(), len(way.measured.delays_s)
        added = {key: round(value - direct[key], 3) for key, value in row.items()}
        each_us = way.used_s / chunks * 1e6
        texts = [f"{key} {value:.2f} ms (added {added[key]:.2f})" for key, value in row.items()]
        print(f"{name}: {', '.join(texts)}; {each_us:.1f} us of CPU per chunk, {way.used_s / seconds:.0%} of a core")
        found |= {f"{name} {key} ms": round(value, 3) for key, value in row.items()}
        found |= {f"{name} added {key} ms": value for key, value in added.items()}
        found |= {f"{name} us per chunk": round(each_us, 1), f"{name} chunks": chunks}
    load = os.getloadavg()[0]
    print(f"load average {load:.1f}")
    return {**found, "load": load}


PEER = Peer(endpoint="h:1", epoch="e", fingerprint="f", block_size=64, transports=("tcp",), host_id="h")
LOAD = Load(epoch="e", seq=1, requests=9, waiting=1, waiting_tokens=500, prefill_tokens_per_s=9000.0, gap_s=0.01)


def fleet(draw: random.Random, *, pools: bool) -> Backends:
    """64 engines that have reported; with `pools`, half of them are for prompts."""
    backends = Backends(policy=CacheAware(), times=Timeouts(1.0, 1.0, 1.0), probe_interval_s=1.0)
    roles: tuple[Role, Role] = ("decode", "prefill") if pools else ("colocated", "colocated")
    entries = tuple(BackendEntry(url=f"http://h{n}:1", pod_uid=str(n), role=roles[n % 2]) for n in range(64))
    backends.apply(BackendSnapshot(version=1, backends=entries))
    for backend in backends.all:
        backend.reported(LOAD.model_copy(update={"peer": PEER} if pools else {}))
        backend.healthy, backend.pending = True, draw.randrange(20)
    return backends


def report_all(backends: Backends, queues: Sequence[tuple[int, ...]] = ()) -> None:
    """Let every engine report once more, with these prompts that wait: a report is young for a second."""
    for number, backend in enumerate(backends.all):
        known = dict(backend.report or LOAD) | {"seq": backend.report.seq + 1 if backend.report else 0}
        if queues:
            prompts = queues[number]
            known |= {"waiting": len(prompts), "waiting_tokens": sum(prompts), "prompts": prompts, "step_tokens": 2048}
        backend.reported(Load(**known))


def each_us(call: Callable[[], object], setup: Callable[[], object] = lambda: None) -> float:
    """Least processor time of a call."""
    return min(timeit.repeat(call, setup, number=20, repeat=60, timer=time.process_time)) / 20 * 1e6


async def decision() -> None:
    """CPU time of the estimate of an 8k-token prompt and of the choice among 64 backends; a million beginnings.

    The choice is all of it: which engines are ready, costs, and what is noted of the request.
    """
    draw = random.Random(1)
    body = json.dumps({"messages": [{"role": "user", "content": draw.randbytes(12_250).hex() + "words " * 1300}]})
    content = body.encode()
    work = work_of(content, [], may_split=True)
    alone, pools = fleet(draw, pools=False), fleet(draw, pools=True)
    print(
        f"{work.tokens} tokens, {len(alone.all)} backends: estimate {each_us(lambda: work_of(content, [])):.0f} us, "
        f"choice {each_us(lambda: alone.choose_shared(set(), work, b''), lambda: report_all(alone)):.0f} us, "
        f"of a pair {each_us(lambda: pools.choose_shared(set(), work, b''), lambda: report_all(pools)):.0f} us"
    )
    short = work_of(json.dumps({"prompt": draw.randbytes(2000).hex()}).encode(), [])
    queues = [tuple(draw.choice((draw.randint(100, 3000), draw.randint(3000, 60_000)))
                    for _ in range(draw.randrange(11))) for _ in alone.all]  # fmt: skip
    print(
        f"{short.tokens} tokens, up to 10 prompts of up to 60,000 wait at each backend: choice "
        f"{each_us(lambda: alone.choose_shared(set(), short, b''), lambda: report_all(alone, queues)):.0f} us"
    )
    await alone.stop()
    await pools.stop()
    million_beginnings(draw)


def million_beginnings(draw: random.Random) -> None:
    """Resident memory of a policy that gets a million requests, each of a beginning and a session of its own."""
    policy, engines = CacheAware(), fleet(draw, pools=False).all
    store = SharedStore(name="s", block_size=16, block_bytes=4096, readable=True)
    policy.stored.reported(engines[0].identity, store)
    sizes, begun = [], time.monotonic()
    for number in range(1_000_000):
        work = Work(256, (draw.getrandbits(64) or 1,), b"session %d" % number)
        policy.note(work, Pair(engines[number % len(engines)], None, 256))
        if number % 100_000 == 99_999:
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    seconds, shown = time.monotonic() - begun, ", ".join(f"{size / 2**20:.1f}" for size in sizes)
    print(f"MiB resident after each 100,000 of a million beginnings: {shown}; {seconds:.1f} s")


def main() -> None:
    if sys.argv[1:2] == ["decision"]:
        asyncio.run(decision())
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams-per-s", type=float, default=50)
    parser.add_argument("--chunks", type=int, default=50)
    parser.add_argument("--gap-ms", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pin", type=int, help="core of the router")
    parser.add_argument("--spread", action="store_true", help="streams begin at random times, not with the steps")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    settings = Settings(given.streams_per_s, given.chunks, given.gap_ms / 1e3, given.seconds, given.spread)
    found = {"streams/s": given.streams_per_s, "chunks/s": given.streams_per_s * given.chunks}
    found |= measure(settings, rounds=given.rounds, pin=given.pin)
    print(json.dumps(found))
    if given.json is not None:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
