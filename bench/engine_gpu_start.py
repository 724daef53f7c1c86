"""P9: the time from the start of the server's process to the first token of an answer.

Llama-3.1-8B shape on one GPU, weights in the page cache.

    python -m bench.engine_gpu_start --folder /data/model --out DIR
    python -m bench.engine_gpu_start --rounds 3

Makes a folder of bfloat16 safetensors in `--folder` (16 GB of zeros; another folder with weights of its own may be
named), reads it once, so that it is in the page cache, then starts `python -m stoker.engine` and asks for one streamed
token as soon as it reports ready. The first round compiles kernels into an empty Triton cache, the others find them
there. P9.json is written anew after each round. The last line is JSON: seconds, and the parts that `/status` reports.
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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models

from bench.model_shapes import LLAMA31_8B, QWEN3_06B
from bench.random_model import shard_header, write_folder
from stoker.model.weights.hugging_face import PlannedTensor

SHAPES = {"8b": LLAMA31_8B, "0.6b": QWEN3_06B}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "stoker-start"))
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    parser.add_argument("--layers", type=int, help="fewer, to try the script out")
    parser.add_argument("--limit-s", type=float, default=180.0, help="until the server of one round is ready")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.folder.exists():
        make_folder(arguments.folder, arguments.shape, arguments.layers)
    for file in sorted(arguments.folder.glob("*.safetensors")):
        subprocess.run(["cat", str(file)], stdout=subprocess.DEVNULL, check=True)
    results = []
    with tempfile.TemporaryDirectory() as cache:
        for number in range(arguments.rounds):
            log = arguments.out / f"P9-{number}.log"
            results.append(start_once(arguments.folder, arguments.device, Path(cache), log, arguments.limit_s))
            print(json.dumps(results[-1]), flush=True)
            (arguments.out / "P9.json").write_text(json.dumps(summary(results), indent=1) + "\n")
    print(json.dumps(summary(results)))


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "cold_s": results[0]["first_token_s"],
        "warm_s": min(one["first_token_s"] for one in results),
        "rounds": results,
    }


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


def start_once(folder: Path, device: str, cache: Path, log: Path, limit_s: float) -> dict[str, Any]:
    port = free_port()
    config = {
        "listen": {"host": "127.0.0.1", "port": port},
        "device": device,
        "model": {"path": str(folder), "names": ["m"]},
        "scheduler": {"max_batch_tokens": 8192, "max_model_len": 8192},
    }
    file = cache / "config.json"
    file.write_text(json.dumps(config))
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache / "triton")}
    begin = time.monotonic()
    with log.open("w") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "stoker.engine", "--config", str(file)],
            stdout=output,
            stderr=output,
            env=environment,
        )
    try:
        ready_s = wait_until_ready(port, server, begin, limit_s)
        first_s = first_token(port, begin)
        status = get(port, "/status")
        ready_again_s = time.monotonic()
        first_token(port, 0.0)
        warm_request_s = time.monotonic() - ready_again_s
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    return {
        "ready_s": round(ready_s, 3),
        "first_token_s": round(first_s, 3),
        "second_request_s": round(warm_request_s, 3),
        "parts": status["startup_s"],
    }


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
