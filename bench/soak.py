"""Memory of a serving engine over an hour: core, front and router under mixed load through real processes and HTTP.

The load has a fixed number of clients. Each sends one request after another: short and long prompts, shared prefixes,
streams and whole answers, several choices, log-probabilities, chats, wrong requests, and clients that leave half-way.
Every ten seconds the resident memory of each process is read, and the engine's own counters beside it. At the end the
cache must be empty of owners, and no answer may have been a 5xx.

    python bench/soak.py                                        # a tiny random model, 60 minutes
    python bench/soak.py --minutes 5
    python bench/soak.py --model ~/.cache/stoker/models/smollm2-135m-instruct --minutes 20 --cache-bytes 134217728

The whole curve goes to `bench/out/soak.json` (`--out`). The last line is JSON: the figures without the curve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

OUT = Path(__file__).parent / "out" / "soak.json"
SAMPLE_S = 10.0
START_S = 300.0
"""Longest start on a busy machine."""
MIB = 2**20
WORDS = [
    "the",
    "sea",
    "lighthouse",
    "bread",
    "moon",
    "train",
    "chess",
    "rain",
    "old",
    "oak",
    "violin",
    "winter",
    "library",
    "coffee",
    "bridge",
    "desert",
]
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def main() -> int:
    """Run the load; return 0 when no answer was a 5xx and every block was given back."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="soak-") as name, ExitStack() as stack:
        folder = Path(name)
        model = arguments.model or write_model(folder / "tiny")
        programs = stack.enter_context(running_programs(folder, model, arguments))
        soak = Soak(programs, arguments)
        asyncio.run(soak.run())
    figures = soak.figures()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({**figures, "curve": soak.curve}) + "\n")
    print(json.dumps(figures))
    return 0 if figures["server_errors"] == 0 and figures["owned_blocks_at_end"] == 0 else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", type=Path, help="a model folder; default: a tiny one with random weights")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--cache-bytes", type=int, default=8 * MIB)
    parser.add_argument("--max-prompt", type=int, default=600, help="words")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


# The programs.


@dataclass(frozen=True)
class Programs:
    """The running processes and the router's address."""

    url: str
    engine_url: str
    pids: Mapping[str, int]
    """Process ids by role; the core is the engine's child."""


def write_model(folder: Path) -> Path:
    """Write a tiny random llama with a tokenizer over bytes."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE["vocab_size"], special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    return folder


@contextmanager
def running_programs(folder: Path, model: Path, arguments: argparse.Namespace) -> Iterator[Programs]:
    """Run engine and router as processes until the end of the block."""
    engine_port, router_port = free_port(), free_port()
    engine_url, url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{router_port}"
    engine_config = {
        "model": {"path": str(model), "names": ["soak"]},
        "listen": {"host": "127.0.0.1", "port": engine_port},
        "device": "cpu",
        "threads": arguments.threads,
        "cache": {"memory_bytes": arguments.cache_bytes},
    }
    backends = {"version": 1, "backends": [{"url": engine_url, "pod_uid": "engine-0"}]}
    (folder / "backends.json").write_text(json.dumps(backends))
    router_config = {
        "deployment": "soak",
        "listen": {"host": "127.0.0.1", "port": router_port},
        "backends_file": str(folder / "backends.json"),
        "hold_s": START_S,
    }
    with (
        process("stoker.engine", engine_config, folder, "engine-0") as engine,
        process("stoker.router", router_config, folder, "router-0") as router,
    ):
        wait_until_ready(engine_url, engine, folder / "stoker.engine.log")
        wait_until_ready(url, router, folder / "stoker.router.log")
        pids = {"core": child_of(engine.pid), "front": engine.pid, "router": router.pid}
        yield Programs(url, engine_url, pids)


@contextmanager
def process(module: str, config: Mapping[str, Any], folder: Path, pod_uid: str) -> Iterator[subprocess.Popen[bytes]]:
    config_file, log = folder / f"{module}.json", folder / f"{module}.log"
    config_file.write_text(json.dumps(config))
    environment = {**os.environ, "STOKER_POD_UID": pod_uid, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        command = [sys.executable, "-m", module, "--config", str(config_file)]
        running = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        yield running
    finally:
        running.terminate()
        with suppress(subprocess.TimeoutExpired):
            running.wait(60)
        running.kill()
        running.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def wait_until_ready(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    import httpx

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and running.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(f"{url}/readyz").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"not ready: {log.read_text()[-2000:]}")


def child_of(pid: int) -> int:
    """Return the process's only child."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def memory_of(pid: int) -> dict[str, float]:
    """Return MiB of a process: resident, of it anonymous, and the peak."""
    names = {"VmRSS": "rss", "RssAnon": "anonymous", "VmHWM": "peak"}
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in names:
            found[names[name]] = round(int(rest.split()[0]) / 1024, 2)
    return found


# The load.


@dataclass
class Soak:
    """The clients, the samples and their figures."""

    programs: Programs
    arguments: argparse.Namespace
    curve: list[dict[str, Any]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    began_s: float = field(default_factory=time.monotonic)
    load_at_start: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began_s

    async def run(self) -> None:
        """Run the load until the time is over, then a rest in which everything must be given back."""
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            sampling = asyncio.create_task(self._sample_regularly(http))
            until_s = self.arguments.minutes * 60
            seeds = range(self.arguments.clients)
            await asyncio.gather(
                *(self._client(http, random.Random(f"{self.arguments.seed}-{i}"), until_s) for i in seeds)
            )
            sampling.cancel()
            await asyncio.wait({sampling})
            await asyncio.sleep(3)
            await self._sample(http)

    async def _client(self, http: aiohttp.ClientSession, dice: random.Random, until_s: float) -> None:
        while self.seconds < until_s:
            path, body = make_request(dice, self.arguments.max_prompt, self.arguments.max_tokens)
            leaves_after = dice.randrange(1, 6) if body.get("stream") and dice.random() < 0.3 else None
            try:
                await self._ask(http, path, body, leaves_after)
            except (aiohttp.ClientError, TimeoutError) as error:
                self.counts[f"failed {type(error).__name__}"] += 1

    async def _ask(
        self, http: aiohttp.ClientSession, path: str, body: Mapping[str, Any], leaves_after: int | None
    ) -> None:
        """Send one request; `leaves_after`: events after which the client closes its connection."""
        async with http.post(self.programs.url + path, json=body) as answer:
            self.counts[str(answer.status)] += 1
            if answer.status >= 500:
                return
            num_events = 0
            async for line in answer.content:
                num_events += line.startswith(b"data:")
                if leaves_after is not None and num_events >= leaves_after:
                    self.counts["left"] += 1
                    answer.close()
                    return
                if line.startswith(b'data: {"error"'):
                    self.counts["broken streams"] += 1

    # Samples.

    async def _sample_regularly(self, http: aiohttp.ClientSession) -> None:
        while True:
            await self._sample(http)
            await asyncio.sleep(SAMPLE_S)

    async def _sample(self, http: aiohttp.ClientSession) -> None:
        memory = {role: memory_of(pid) for role, pid in self.programs.pids.items()}
        async with http.get(f"{self.programs.engine_url}/metrics") as answer:
            metrics = parse_metrics(await answer.text())
        sample = {"s": round(self.seconds, 1), **memory, "requests": sum_of_answers(self.counts), **metrics}
        self.curve.append(sample)
        if len(self.curve) % 30 == 1:
            sizes = "  ".join(f"{role} {figures['rss']:.0f}" for role, figures in memory.items())
            print(f"{self.seconds / 60:5.1f} min  {sizes} MiB  {sample['requests']} requests", flush=True)

    def figures(self) -> dict[str, Any]:
        """Return the result without the curve."""
        return {
            "minutes": round(self.seconds / 60, 1),
            "model": self.arguments.model.name if self.arguments.model else "tiny",
            "cache_mib": round(self.arguments.cache_bytes / MIB),
            "load_at_start": round(self.load_at_start, 1),
            "load_at_end": round(os.getloadavg()[0], 1),
            "requests": sum_of_answers(self.counts),
            "counts": dict(sorted(self.counts.items())),
            "server_errors": sum(count for status, count in self.counts.items() if status[:1] == "5"),
            "owned_blocks_at_end": self.curve[-1]["owned"],
            "memory_mib": {role: self._growth(role) for role in self.programs.pids},
        }

    def _growth(self, role: str) -> dict[str, float]:
        """Return resident MiB at the start and at each quarter of the time, and the rate of the second half."""
        points = [(sample["s"], sample[role]["rss"]) for sample in self.curve]
        quarters = {f"at_{n}_4": points[min(len(points) - 1, len(points) * n // 4)][1] for n in range(5)}
        rate = slope(points[len(points) // 2 :]) * 3600
        return {**quarters, "peak": self.curve[-1][role]["peak"], "mib_per_hour_second_half": round(rate, 2)}


def make_request(dice: random.Random, max_prompt: int, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return one of the load's requests."""
    prompt = make_prompt(dice, max_prompt)
    body: dict[str, Any] = {"max_tokens": log_uniform(dice, 1, max_tokens), "stream": dice.random() < 0.6}
    body |= dice.choice([{"temperature": 0}, {"top_p": 0.9}, {"temperature": 0.7, "top_k": 20}, {}])
    if dice.random() < 0.03:
        return "/v1/completions", {"prompt": prompt, "max_tokens": -1}
    if dice.random() < 0.3:
        return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}
    body |= dice.choices(
        [{}, {"n": 2}, {"logprobs": 3}, {"stop": [" the"]}, {"echo": True, "logprobs": 1}], [8, 1, 1, 1, 1]
    )[0]
    return "/v1/completions", {**body, "prompt": prompt}


def make_prompt(dice: random.Random, max_words: int) -> str:
    """Return a prompt; a few begin alike, so that the prefix cache has hits."""
    shared = random.Random(dice.randrange(8))
    words = [shared.choice(WORDS) for _ in range(40)] if dice.random() < 0.3 else []
    words += [dice.choice(WORDS) for _ in range(log_uniform(dice, 1, max_words))]
    return " ".join(words)


def log_uniform(dice: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** dice.random())


def sum_of_answers(counts: Mapping[str, int]) -> int:
    return sum(count for status, count in counts.items() if status.isdigit())


def parse_metrics(text: str) -> dict[str, float]:
    """Return the engine's counters that are recorded beside the memory."""
    names = {
        "stoker:kv_blocks_owned": "owned",
        "stoker:kv_blocks_cached": "cached",
        "vllm:generation_tokens_total": "tokens",
        "stoker:steps_total": "steps",
    }
    found = {}
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in names:
            found[names[name]] = float(line.rpartition(" ")[2])
    return found


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of a line through the points, by least squares."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


if __name__ == "__main__":
    sys.exit(main())
