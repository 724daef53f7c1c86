"""Load on a server that speaks OpenAI's completions: requests at random times, each token's arrival noted.

    python -m bench.gpu.serve_load --port 8000 --model m P7a P7b P7c P7d

An open loop: a request is sent when it is due, whatever the server does. Prompts are token ids; answers are streamed,
greedy, and end tokens are ignored, so that every answer has its full length. The client shares no process with the
server. It prints a line per workload and says how late it sent; `--out` gets the same as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

EVENT = b"data: {"


@dataclass(frozen=True)
class Workload:
    """Requests of one kind. `rate` 0: all at once."""

    rate: float
    """Requests per second; the pauses between them are exponential."""
    count: int
    own_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    """Leading tokens that all prompts have in common."""


WORKLOADS = {
    "P7a": Workload(16, 320, 512, 128),
    "P7b": Workload(32, 640, 512, 128),
    "P7c": Workload(32, 480, 64, 64, shared_tokens=1024),
    "P7d": Workload(0, 512, 512, 128),
    "P7e": Workload(0, 64, 64, 64, shared_tokens=1024),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="m")
    parser.add_argument("--vocab", type=int, default=32000, help="token ids are drawn below it")
    parser.add_argument("--count", type=int, help="fewer requests, to try the script out")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.workloads:
        workload = WORKLOADS[name]
        workload = replace(workload, count=arguments.count or workload.count)
        results[name] = asyncio.run(run(workload, arguments.port, arguments.model, arguments.vocab, name))
        shown = {key: value for key, value in results[name].items() if key != "exchanges"}
        print(f"{name}: {json.dumps(shown)}", flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


async def run(workload: Workload, port: int, model: str, vocab: int, seed: str) -> dict[str, Any]:
    """Send all requests and return the figures, in milliseconds."""
    rng = random.Random(seed)
    shared = [rng.randrange(vocab) for _ in range(workload.shared_tokens)]
    bodies = [body(model, shared + [rng.randrange(vocab) for _ in range(workload.own_tokens)], workload)
              for _ in range(workload.count)]  # fmt: skip
    pauses = [rng.expovariate(workload.rate) if workload.rate else 0.0 for _ in bodies]
    begin = time.monotonic() + 0.1
    due = [begin + offset for offset in itertools.accumulate(pauses)]
    exchanges = await asyncio.gather(*(exchange(port, one, at) for one, at in zip(bodies, due, strict=True)))
    found = {"began_s": begin, "ended_s": time.monotonic()} | figures(exchanges, workload)
    return found | {"exchanges": [(one.sent_s, one.stamps[0]) for one in exchanges if one.stamps]}


def body(model: str, prompt: Sequence[int], workload: Workload) -> bytes:
    content = {
        "model": model, "prompt": list(prompt), "max_tokens": workload.output_tokens, "stream": True,
        "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    return json.dumps(content).encode()


class Exchange(asyncio.Protocol):
    """One request on a connection of its own, and the arrival times of its events."""

    def __init__(self, content: bytes, due_s: float) -> None:
        self.content, self.due_s = content, due_s
        self.sent_s = 0.0
        self.stamps: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""
        self.head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        head = [
            "POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close", "Content-Type: application/json",
            f"Content-Length: {len(self.content)}", "", "",
        ]  # fmt: skip
        transport.write("\r\n".join(head).encode() + self.content)
        self.sent_s = time.monotonic()

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if not self.head:
            self.head = data[:200]
        seen = self._tail + data
        self.stamps += [now_s] * seen.count(EVENT)
        self._tail = seen[-len(EVENT) + 1 :]

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # a broken answer has too few events
        self.done.set_result(None)


async def exchange(port: int, content: bytes, due_s: float) -> Exchange:
    await asyncio.sleep(due_s - time.monotonic())
    made = Exchange(content, due_s)
    await asyncio.get_running_loop().create_connection(lambda: made, "127.0.0.1", port)
    await made.done
    return made


def figures(exchanges: Sequence[Exchange], workload: Workload) -> dict[str, Any]:
    good = [one for one in exchanges if len(one.stamps) == workload.output_tokens]
    failed = [one for one in exchanges if len(one.stamps) != workload.output_tokens]
    if not good:
        raise SystemExit(f"no request was answered in full; the first: {failed[0].head!r}")
    firsts = [one.stamps[0] - one.sent_s for one in good]
    gaps = [later - earlier for one in good for earlier, later in itertools.pairwise(one.stamps)]
    per_token = [(one.stamps[-1] - one.stamps[0]) / (len(one.stamps) - 1) for one in good]
    seconds = max(one.stamps[-1] for one in good) - min(one.sent_s for one in good)
    return {
        "ttft_ms": spread(firsts),
        "gap_ms": spread(gaps),
        "ms_per_token": round(1000 * statistics.mean(per_token), 2),
        "output_tokens_per_s": round(len(good) * workload.output_tokens / seconds, 1),
        "late_ms": spread([one.sent_s - one.due_s for one in exchanges]),
        "requests": len(good),
        "failed": len(failed),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    found = {
        name: round(1000 * ordered[min(int(part * len(ordered)), len(ordered) - 1)], 2) for name, part in places.items()
    }
    return found | {"max": round(1000 * ordered[-1], 2)}


if __name__ == "__main__":
    main()
