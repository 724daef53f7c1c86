"""The cost of the router: latency that it adds to the chunks of streams, its CPU time per chunk, and one decision.

python -m bench.router_stream [--streams-per-s 50] [--chunks 50] [--gap-ms 20] [--seconds 20] [--pin 2] [--json FILE]
python -m bench.router_stream decision

An engine without a model (own process) writes the time into each chunk; one client (own process) reads the same load
directly and through `python -m stoker.router` in turn (`--rounds`). All clocks are the machine's monotonic one. The
bars: 50 streams/s add at most 1 ms (p50) and 3 ms (p99), to first tokens and to chunks. `--pin` keeps the router on one
core of many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path

from stoker.router.cache_aware import CacheAware
from stoker.router.load import Load, Peer
from stoker.router.prefix_index import PrefixIndex
from stoker.router.snapshot import Role
from stoker.router.work import work_of

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-stoker-resume: 1\r\n\r\n"


@dataclass
class Settings:
    streams_per_s: float
    chunks: int
    gap_s: float
    seconds: float


async def engine(port: int, settings: Settings) -> None:
    """Answer each POST with a stream of chunks that hold the time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if b"content-length" in x), 0)
                await reader.readexactly(length)
                if head.startswith(b"POST"):
                    await stream(writer)
                else:
                    body = b'{"pod_uid": "a", "phase": "Serving"}'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    async def stream(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        begun = time.monotonic()
        for number in range(settings.chunks):
            await asyncio.sleep(begun + number * settings.gap_s - time.monotonic())
            choice = {"index": 0, "delta": {"content": " word"}, "logprobs": None, "finish_reason": None}
            chunk = {
                "id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": "chat.completion.chunk", "created": 1,
                "model": "m", "system_fingerprint": None, "choices": [choice], "sent": time.monotonic(),
                "stoker": {"tokens": [number]},
            }  # fmt: skip
            event = b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@dataclass
class Measured:
    delays_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        self.delays_s += other.delays_s
        self.first_s += other.first_s

    def row(self) -> dict[str, float]:
        """Milliseconds."""
        cuts = statistics.quantiles(self.delays_s, n=100)
        first = statistics.quantiles(self.first_s, n=100)
        return {
            "chunk p50": cuts[49] * 1e3, "chunk p99": cuts[98] * 1e3, "first p50": first[49] * 1e3,
            "first p99": first[98] * 1e3,
        }  # fmt: skip


async def client(port: int, settings: Settings) -> Measured:
    """Open streams at a constant rate; measure from each chunk's writing to its arrival."""
    measured = Measured()
    body = json.dumps({"stream": True, "messages": [{"role": "user", "content": "word " * 200}]}).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def one() -> None:
        asked = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        first = True
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                at = line.find(b'"sent":') + 7
                measured.delays_s.append(now - float(line[at : line.find(b",", at)]))
                if first:
                    measured.first_s.append(now - asked)
                    first = False
            elif line.startswith(b"data: [DONE]"):
                break
        writer.close()

    begun, tasks = time.monotonic(), []
    for number in range(int(settings.streams_per_s * settings.seconds)):
        await asyncio.sleep(begun + number / settings.streams_per_s - time.monotonic())
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    return measured


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(settings: Settings, *, rounds: int, pin: int | None) -> dict[str, float]:
    """Measure the same load directly and through the router, in turn."""
    arguments = [str(settings.streams_per_s), str(settings.chunks), str(settings.gap_s), str(settings.seconds)]
    own = [sys.executable, "-m", "bench.router_stream", "engine", *arguments]
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(own, stdout=subprocess.PIPE, text=True) as engine_:
        assert engine_.stdout is not None
        engine_port = int(engine_.stdout.readline())
        router_port = engine_port + 1 if engine_port < 65000 else engine_port - 1000
        entry = {"url": f"http://127.0.0.1:{engine_port}", "pod_uid": "a"}
        Path(folder, "backends.json").write_text(json.dumps({"version": 1, "backends": [entry]}), encoding="utf-8")
        config = {"deployment": "d", "backends_file": f"{folder}/backends.json", "listen": {"port": router_port}}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        router = subprocess.Popen([sys.executable, "-m", "stoker.router", "--config", f"{folder}/config.json"],
                                  stderr=subprocess.DEVNULL)  # fmt: skip
        if pin is not None:
            os.sched_setaffinity(router.pid, {pin})
        direct, through, used = Measured(), Measured(), 0.0
        try:
            wait_until_ready(router_port)
            for _ in range(rounds):
                direct.add(asyncio.run(client(engine_port, settings)))
                before = cpu_s(router.pid)
                through.add(asyncio.run(client(router_port, settings)))
                used += cpu_s(router.pid) - before
        finally:
            router.kill()
            router.wait()
            engine_.kill()
    return report(direct, through, used, rounds * settings.seconds)


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


def report(direct: Measured, through: Measured, used_s: float, seconds: float) -> dict[str, float]:
    """Milliseconds that the router adds, and its processor time."""
    alone, routed, chunks = direct.row(), through.row(), len(through.delays_s)
    for name, value in alone.items():
        print(f"{name}: direct {value:.2f} ms, router {routed[name]:.2f} ms, added {routed[name] - value:.2f} ms")
    load = os.getloadavg()[0]
    print(f"{chunks} chunks, router CPU {used_s:.2f} s: {used_s / chunks * 1e6:.0f} us per chunk, "
          f"{used_s / seconds * 100:.0f} % of a core; load average {load:.1f}")  # fmt: skip
    added = {f"added {name} ms": round(routed[name] - value, 3) for name, value in alone.items()}
    direct_row = {f"direct {name} ms": round(value, 3) for name, value in alone.items()}
    return {**added, **direct_row, "chunks": chunks, "us per chunk": round(used_s / chunks * 1e6, 1), "load": load}


@dataclass
class Place:
    identity: tuple[str, str]
    pending: int
    load: Load | None
    unstarted_tokens: int = 0
    silent: bool = False
    role: Role = "colocated"
    revision: str = ""


PEER = Peer(endpoint="h:1", epoch="e", fingerprint="f", block_size=64, transports=("tcp",), host_id="h")


def decision() -> None:
    """CPU time of the estimate of an 8k-token prompt and of the choice among 64 backends; a million beginnings."""
    draw = random.Random(1)
    load = Load(epoch="e", seq=1, requests=9, waiting=1, waiting_tokens=500, prefill_tokens_per_s=9000.0, gap_s=0.01)
    places = [Place((str(number), "e"), draw.randrange(20), load) for number in range(64)]
    body = json.dumps({"messages": [{"role": "user", "content": draw.randbytes(12_250).hex() + "words " * 1300}]})
    policy, content = CacheAware(), body.encode()
    work = work_of(content, [])
    estimate = min(timeit.repeat(lambda: work_of(content, []), number=50, repeat=15, timer=time.process_time)) / 50
    choice = min(timeit.repeat(lambda: policy(places, 3, work), number=50, repeat=15, timer=time.process_time)) / 50
    paired = load.model_copy(update={"peer": PEER})
    pools = [replace(place, load=paired, role="decode" if number % 2 else "prefill") for number, place in
             enumerate(places)]  # fmt: skip

    def choose_pair() -> None:
        policy.note(work, policy.pair(pools, pools, 3, work))

    pair = min(timeit.repeat(choose_pair, number=50, repeat=15, timer=time.process_time))
    print(
        f"{work.tokens} tokens, {len(places)} backends: estimate {estimate * 1e6:.0f} us, choice {choice * 1e6:.0f} us,"
        f" of a pair {pair / 50 * 1e6:.0f} us"
    )
    index, begun = PrefixIndex(), time.monotonic()
    before = index.num_bytes
    for _ in range(1_000_000):
        index.add((draw.getrandbits(64) or 1,), draw.randrange(1, 64))
    seconds = time.monotonic() - begun
    print(
        f"a million beginnings: {before / 2**20:.1f} MiB before, {index.num_bytes / 2**20:.1f} after, {seconds:.1f} s"
    )


def main() -> None:
    if sys.argv[1:2] == ["engine"]:
        rate, chunks, gap_s, seconds = sys.argv[2:]
        asyncio.run(engine(0, Settings(float(rate), int(chunks), float(gap_s), float(seconds))))
        return
    if sys.argv[1:2] == ["decision"]:
        decision()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams-per-s", type=float, default=50)
    parser.add_argument("--chunks", type=int, default=50)
    parser.add_argument("--gap-ms", type=float, default=20)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--pin", type=int, help="core of the router")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    settings = Settings(given.streams_per_s, given.chunks, given.gap_ms / 1e3, given.seconds)
    found = {"streams/s": given.streams_per_s, "chunks/s": given.streams_per_s * given.chunks}
    found |= measure(settings, rounds=given.rounds, pin=given.pin)
    print(json.dumps(found))
    if given.json is not None:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
