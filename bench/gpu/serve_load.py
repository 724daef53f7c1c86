"""Load on a server that speaks OpenAI's completions: requests at random times, each token's arrival noted.

    python -m bench.gpu.serve_load --port 8000 --model m P7a P7b P7c P7d

An open loop: a request is sent when it is due, whatever the server does. Prompts are token ids; answers are streamed,
greedy, and end tokens are ignored, so that every answer has its full length. The client shares no process with the
server. It prints a line per workload and says how late it sent; `--out` gets the same as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.cli.load.exchange import Target
from stoker.cli.load.figures import figures
from stoker.cli.load.figures import spread as spread_of
from stoker.cli.load.sending import send_all
from stoker.cli.load.workload import Request, Writer, arrivals, drawn
from stoker.pod.token_lengths import TokenLengths


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
    """Send all requests as `stoker bench serve` does, and return the figures, in milliseconds."""
    due_s = arrivals(workload.count, workload.rate or math.inf, 1.0, seed)
    own, output = (TokenLengths(count, count) for count in (workload.own_tokens, workload.output_tokens))
    requests = drawn(Writer("ids", seed, vocab), due_s, own, output, workload.shared_tokens)
    bodies = [(one.due_s, one.max_tokens, body(model, one)) for one in requests]
    began_s = time.monotonic()
    answers = await send_all(Target("127.0.0.1", port, "/v1/completions", None, {}), bodies)
    found = {"began_s": began_s, "ended_s": time.monotonic()} | figures(answers, {})
    if found["failed"] == found["requests"]:
        raise SystemExit(f"no request was answered: {found['errors']}")
    return found | {"exchanges": [(one.sent_s, one.stamps[0]) for one in answers if one.stamps]}


def body(model: str, request: Request) -> bytes:
    content = {
        "model": model, "prompt": request.prompt, "max_tokens": request.max_tokens, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    return json.dumps(content).encode()


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles in milliseconds."""
    return spread_of([1000 * value for value in seconds])


if __name__ == "__main__":
    main()
