"""One and two HTTP fronts over the same core: streams per second, gaps between chunks, processor time of the fronts.

python -m bench.fronts_http [--streams 64] [--tokens 64] [--seconds 10]

The core has no model: each step gives one token to every running request, as a fast GPU would. Fronts are the real
program with a real tokenizer. One client (own process) keeps `--streams` streams open. On a machine of two cores the
client, the core and one front fill both, so requests per second can hardly grow there; the processor time of the
busiest front, which bounds a server with enough cores, halves all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import zmq

from stoker.engine.config import EngineConfig
from stoker.engine.core import messages as m
from stoker.engine.core.stats import STEP_TOKENS
from stoker.engine.program import Environment, run_engine
from testing.engine.fake_core import FACTS
from testing.engine.stats import STATS
from testing.engine.tiny_tokenizer import tokenizer_json

STEP_S = 0.01
PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


def core(address: str, folder: str) -> None:
    """Give each running request one token per step until it has all of its tokens or is aborted."""
    bound = zmq.Context().socket(zmq.ROUTER)
    bound.bind(address)
    facts = replace(FACTS, tokenizer_folder=folder, vocab_size=300, max_model_len=100_000, eos_token_ids=())
    left: dict[tuple[bytes, str], int] = {}
    begun: set[tuple[bytes, str]] = set()
    fronts: set[bytes] = set()
    stats = replace(STATS, step_tokens=(0,) * (len(STEP_TOKENS) + 1))
    step_s = beat_s = time.monotonic()
    while True:
        while bound.poll(max(0, int(1000 * (step_s - time.monotonic())))):
            front, frame = bound.recv_multipart()
            message = m.unpack(frame)
            fronts.add(front)
            if isinstance(message, m.Hello):
                bound.send_multipart([front, m.pack(m.CoreState("Serving", "", facts))])
            elif isinstance(message, m.AddRequest):
                left[front, message.request_id] = message.params.max_tokens or 1
            elif isinstance(message, m.Abort):
                for request_id in message.request_ids:
                    left.pop((front, request_id), None)
            elif isinstance(message, m.Drain):
                for one in fronts:
                    bound.send_multipart([one, m.pack(m.CoreState("Drained", "", facts))])
            elif isinstance(message, m.Stop):
                return
        step_s = max(step_s + STEP_S, time.monotonic())
        deltas: dict[bytes, list[m.Delta]] = {}
        for (front, request_id), count in list(left.items()):
            ended = count == 1
            facts_of_one = _facts() if ended or (front, request_id) not in begun else None
            deltas.setdefault(front, []).append(
                m.Delta(
                    request_id, 0, (65 + count % 26,), finish_reason="length" if ended else None, facts=facts_of_one
                )
            )
            begun.add((front, request_id))
            left[front, request_id] = count - 1
            if ended:
                del left[front, request_id]
        for front, some in deltas.items():
            bound.send_multipart([front, m.pack(m.Outputs(tuple(some)))])
        if time.monotonic() - beat_s > 0.5:
            beat_s = time.monotonic()
            for one in fronts:
                bound.send_multipart([one, m.pack(m.Heartbeat(30.0, STEP_S))])
                bound.send_multipart([one, m.pack(stats)])


def _facts() -> m.RequestFacts:
    now = time.monotonic()
    return m.RequestFacts(40, 0, 1, 0, now, now, now, now, now)


def server(folder: str, fronts: int) -> None:
    """Run the program over the core above; the port goes to `folder/port`."""
    port = Path(folder) / "port"

    def command(_: Path, address: str) -> Sequence[str]:
        return [sys.executable, "-m", "bench.fronts_http", "--core", address, "--folder", folder]

    def listening(number: int) -> None:
        port.write_text(str(number))

    config = EngineConfig.model_validate(
        {"model": {"path": "/models/none", "names": ["none"]}, "listen": {"port": 0}, "api": {"fronts": fronts}}
    )
    run_engine(config, Environment(command=command, on_listen=listening))


async def load(port: int, streams: int, tokens: int, seconds: float) -> Mapping[str, Any]:
    """Keep streams open for a time: requests per second, and gaps between chunks of a stream in ms."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    until_s = time.monotonic() + seconds
    gaps: list[float] = []
    answered = 0

    async def follow() -> None:
        nonlocal answered
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.monotonic() < until_s:
            writer.write(head % len(body) + body)
            before, rest = 0.0, b""
            while b"[DONE]" not in rest or not rest.endswith(b"0\r\n\r\n"):
                data = await reader.read(65536)
                assert data, rest
                now = time.monotonic()
                if b"data: {" in data:
                    gaps.extend([now - before] if before else [])
                    before = now
                rest = (rest + data)[-64:]
            answered += 1
        writer.close()

    began_s = time.monotonic()
    await asyncio.gather(*(follow() for _ in range(streams)))
    gaps.sort()
    return {
        "requests_per_s": answered / (time.monotonic() - began_s),
        "requests": answered,
        "gap_p50_ms": 1000 * statistics.median(gaps),
        "gap_p99_ms": 1000 * gaps[int(0.99 * len(gaps))],
    }


def measured(fronts: int, settings: argparse.Namespace) -> dict[str, Any]:
    """One server, loaded once."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tokenizer.json").write_bytes(tokenizer_json())
        command = [sys.executable, "-m", "bench.fronts_http"]
        process = subprocess.Popen([*command, "--server", str(fronts), "--folder", folder])
        try:
            port = _port(Path(folder) / "port", process)
            client = [*command, "--client", str(port), "--streams", str(settings.streams)]
            client += ["--tokens", str(settings.tokens), "--seconds", str(settings.seconds)]
            before = _cpu_s(port)
            figures = json.loads(subprocess.run(client, check=True, capture_output=True).stdout)
            spent = [after - was for after, was in zip(_cpu_s(port), before, strict=True)]
        finally:
            process.terminate()
            process.wait(60)
    thousands = figures["requests"] * settings.tokens / 1000
    return {**figures, "busiest_front_cpu_ms_per_1000_tokens": 1000 * max(spent) / thousands}


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    """The port of a server that is ready at each front."""
    while True:
        time.sleep(0.2)
        assert process.poll() is None, "the server ended"
        if file.exists() and (text := file.read_text()):
            answers = [httpx.get(f"http://127.0.0.1:{text}/readyz", verify=False).status_code for _ in range(4)]
            if answers == [200] * 4:
                return int(text)


def _cpu_s(port: int) -> list[float]:
    """Processor time of each front so far; a single one is the first process."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", verify=False).text
    several = re.findall(r"^stoker_front_process_cpu_seconds_total\{.*\} (\S+)$", text, re.MULTILINE)
    return [float(one) for one in several or re.findall(r"^process_cpu_seconds_total (\S+)$", text, re.MULTILINE)]


def main() -> None:
    """Measure, or be one of the processes that a measurement starts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    for name in ("--core", "--server", "--client", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.core:
        core(settings.core, settings.folder)
    elif settings.server:
        server(settings.folder, int(settings.server))
    elif settings.client:
        found = asyncio.run(load(int(settings.client), settings.streams, settings.tokens, settings.seconds))
        sys.stdout.write(json.dumps(found))
    else:
        results = {fronts: measured(fronts, settings) for fronts in (1, 2)}
        for fronts, figures in results.items():
            rounded = {name: round(value, 2) for name, value in figures.items()}
            sys.stdout.write(f"{fronts} front{'s' * (fronts > 1)}: {rounded}\n")
        ratios = {name: round(results[2][name] / results[1][name], 3) for name in results[1] if name != "requests"}
        sys.stdout.write(
            json.dumps({"ratio": ratios, "load_average": os.getloadavg()[0], "cores": os.cpu_count()}) + "\n"
        )


if __name__ == "__main__":
    main()
