"""P9: the time from the start of the server's process to the first token of an answer, by what is compiled already.

Llama-3.1-8B shape on one GPU, weights in the page cache.

    python -m bench.gpu.engine_gpu_start --folder /data/model --out DIR
    python -m bench.gpu.engine_gpu_start empty shipped filled both

    empty     no kernels but those that the process compiles
    shipped   the kernels of `stoker kernels build`, made by this bench first, and an empty cache of the user's
    filled    no shipped kernels, the cache that `empty` left
    both      shipped kernels, the cache that `empty` left

Makes a folder of bfloat16 safetensors in `--folder` (16 GB of zeros; another folder with weights of its own may be
named), reads it once, so that it is in the page cache, then starts `python -m stoker.engine` and asks for one streamed
token as soon as it reports ready, then for answers of every kind. A row says which kernels were compiled until it was
ready, and which by requests. P9.json is written anew after each row. The last line is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from bench.gpu.model_shapes import LLAMA31_8B, QWEN3_06B
from bench.gpu.random_model import shard_header, write_folder
from stoker.model.weights.hugging_face import PlannedTensor

SHAPES = {"8b": LLAMA31_8B, "0.6b": QWEN3_06B}
NAMES = {"8b": "llama-3.1-8b", "0.6b": "qwen3-0.6b"}
ROWS = ("empty", "shipped", "filled", "both")
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"presence_penalty": 1, "frequency_penalty": 1},
    {"repetition_penalty": 1.1, "top_p": 0.9},
    {"logit_bias": {"3": 1}},
    {"logprobs": 5},
    {"min_tokens": 4, "stop_token_ids": [4]},
    {"prompt": list(range(3, 603))},
    {"prompt": [3 + i % 900 for i in range(4000)]},
    {"prompt": [5]},
)
"""Requests of every kind: their kernels, too, are to be there."""


NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""Not passed on: images have the bytecode of all packages, and a start without it measures Python's compiler."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "stoker-start"))
    parser.add_argument("--kernels", type=Path, help="folder that `stoker kernels build` has filled")
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--layers", type=int, help="fewer, to try the script out")
    parser.add_argument("--limit-s", type=float, default=180.0, help="until the server of one row is ready")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=JSON", help="of the engine's configuration"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(ROWS):
        parser.error(f"unknown rows {sorted(unknown)}; there are {', '.join(ROWS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        measure(arguments, Path(work))


def measure(arguments: argparse.Namespace, work: Path) -> None:
    results: dict[str, Any] = {}

    def keep(name: str, result: Any) -> None:
        results[name] = result
        print(json.dumps({name: result}), flush=True)
        (arguments.out / "P9.json").write_text(json.dumps(results, indent=1) + "\n")

    kernels = arguments.kernels or work / "kernels"
    if arguments.kernels is None and {"shipped", "both"} & set(arguments.rows):
        keep("build", build_kernels(kernels, NAMES[arguments.shape]))
    if not arguments.folder.exists():
        make_folder(arguments.folder, arguments.shape, arguments.layers)
    for file in sorted(arguments.folder.glob("*.safetensors")):
        subprocess.run(["cat", str(file)], stdout=subprocess.DEVNULL, check=True)
    for row in arguments.rows:
        cache = work / ("filled" if row in ("empty", "filled", "both") else row) / "triton"
        environment = {"TRITON_CACHE_DIR": str(cache), "STOKER_KERNELS": str(kernels)}
        if row not in ("shipped", "both"):
            environment["STOKER_KERNELS"] = "off"
        try:
            keep(row, start_once(arguments, environment, work, arguments.out / f"P9-{row}.log"))
        except (SystemExit, OSError, subprocess.SubprocessError) as error:
            keep(row, {"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(results))


def build_kernels(folder: Path, name: str) -> dict[str, Any]:
    command = ["build", "--folder", str(folder), "--model", name, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "stoker.engine.kernels_main", *command], stdout=subprocess.PIPE, check=True, text=True
    )
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def make_folder(folder: Path, shape: str, layers: int | None) -> None:
    """Write headers and holes: files of the right size whose bytes are zeros.

    They take no time to write and the usual time to read.
    """
    config = replace(SHAPES[shape], num_layers=layers or SHAPES[shape].num_layers)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(1000)}, unk_token="t0"))
    write_folder(folder, config, write_holes, tokenizer.to_str())


def write_holes(file: Path, tensors: Mapping[str, PlannedTensor]) -> None:
    header = shard_header(tensors)
    with file.open("wb") as opened:
        opened.write(header.encoded)
        opened.truncate(header.file_bytes)


def start_once(arguments: argparse.Namespace, variables: Mapping[str, str], work: Path, log: Path) -> dict[str, Any]:
    port = free_port()
    config: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": port},
        "device": arguments.device,
        "model": {"path": str(arguments.folder), "names": ["m"]},
        "scheduler": {"max_batch_tokens": 8192, "max_model_len": 8192},
    }
    set_fields(config, arguments.set)
    file = work / "config.json"
    file.write_text(json.dumps(config))
    kept = Path(variables["TRITON_CACHE_DIR"])
    before = compiled_in(kept)
    begin = time.monotonic()
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "stoker.engine", "--config", str(file)],
            stdout=output,
            stderr=output,
            env={name: value for name, value in os.environ.items() if name != NO_BYTECODE} | {**variables},
        )
    try:
        ready_s = wait_until_ready(port, server, begin, arguments.limit_s)
        first_s = first_token(port, begin)
        at_start = compiled_in(kept)
        status = get(port, "/status")
        again_s = time.monotonic()
        first_token(port, 0.0)
        again_s = time.monotonic() - again_s
        answers = [complete(port, one) for one in REQUESTS]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    return {
        "ready_s": round(ready_s, 3),
        "first_token_s": round(first_s, 3),
        "second_request_s": round(again_s, 3),
        "compiled_at_start": names(at_start - before),
        "compiled_by_requests": names(compiled_in(kept) - at_start),
        "refused_requests": [answer for answer in answers if answer != 200],
        "parts": status["startup_s"],
    }


def compiled_in(cache: Path) -> Counter[str]:
    """The kernels, and libraries of the driver, that Triton has put into a cache, by name."""
    kernels = (file.name.removeprefix("__grp__").removesuffix(".json") for file in cache.glob("*/__grp__*"))
    libraries = (file.name.partition(".")[0] for file in cache.glob("*/*.so"))
    return Counter((*kernels, *libraries))


def names(counted: Counter[str]) -> dict[str, int]:
    return dict(sorted(counted.items()))


def set_fields(config: dict[str, Any], given: Sequence[str]) -> None:
    """Set fields of a configuration, each `path.of.field=JSON`."""
    for one in given:
        path, _, value = one.partition("=")
        *parents, name = path.split(".")
        place = config
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = json.loads(value)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_until_ready(port: int, server: subprocess.Popen[bytes], begin: float, limit_s: float) -> float:
    while time.monotonic() - begin < limit_s:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}")
        try:
            if get(port, "/status")["phase"] == "Serving":
                return time.monotonic() - begin
        except OSError:
            pass
        time.sleep(0.01)
    raise SystemExit(f"not ready after {limit_s:g} s")


def get(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def complete(port: int, fields: Mapping[str, Any]) -> int | str:
    """Ask for an answer of a few tokens; return 200, or what came instead."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    body = {"model": "m", "prompt": list(range(3, 51)), "max_tokens": 4, "seed": 1, "ignore_eos": True} | dict(fields)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    connection.close()
    return 200 if answer.status == 200 else f"{answer.status}: {text[:200]}"


def first_token(port: int, begin: float) -> float:
    """Return the seconds until the first streamed piece of an answer to 128 tokens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "m", "prompt": list(range(3, 131)), "max_tokens": 8, "stream": True, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    line = answer.readline()
    while not line.startswith(b"data: "):
        if not line:
            raise SystemExit(f"no answer: {answer.status}")
        line = answer.readline()
    seconds = time.monotonic() - begin
    answer.read()
    connection.close()
    return seconds


if __name__ == "__main__":
    main()
