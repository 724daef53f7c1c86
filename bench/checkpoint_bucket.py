"""Checkpoints in a bucket against a plain client of the same server.

The client is obstore on both sides; each number of bytes is written and read by
  plain   whole objects of the same sizes: `put` and `get`, several at once as the ranks of a pod would
  save    a whole save: hashes, manifest, proof of exact cover, commit; then `verify`, which reads and hashes every byte
Run: python bench/checkpoint_bucket.py s3://BUCKET/PREFIX [--megabytes 512] [--ranks 2] [--rounds 5]
with AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY. A server for one machine: the program versitygw
(github.com/versity/versitygw/cmd/versitygw, a Go module).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from stoker.checkpoint.bucket_access import access_of
from stoker.checkpoint.bucket_storage import open_store
from stoker.checkpoint.manifest import Box, Manifest, Piece, TensorInfo
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.verify import verify
from stoker.checkpoint.writer import PieceWriter

WRITER = "0000beec"
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="s3://BUCKET/PREFIX")
    parser.add_argument("--megabytes", type=int, default=512, help="size of the state")
    parser.add_argument("--ranks", type=int, default=2, help="files that are written at once")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    elements = options.megabytes * 2**20 // 4 // options.ranks
    state = [np.random.default_rng(rank).random(elements, dtype=np.float32) for rank in range(options.ranks)]
    total = sum(values.nbytes for values in state)
    seconds: dict[str, list[float]] = {name: [] for name in ("put", "get", "save", "verify")}
    for number in range(options.rounds):
        measure(options.root, state, number, seconds)
    rates = {name: total / statistics.median(found) / 1e6 for name, found in seconds.items()}
    ratios = {"save": rates["save"] / rates["put"], "verify": rates["verify"] / rates["get"]}
    shown = ", ".join(f"{name} {rate:.0f} MB/s" for name, rate in rates.items())
    print(f"{total / 1e9:.2f} GB by {options.ranks}: {shown}")
    print(f"save against put {ratios['save']:.2f}, verify against get {ratios['verify']:.2f} (goal 0.70)")
    facts = {"bench": "checkpoint_bucket", "bytes": total, "cpus": os.cpu_count(), "seconds": seconds}
    print(json.dumps(facts | {name: round(ratio, 3) for name, ratio in ratios.items()}))


def measure(root: Path, state: list[Array], number: int, seconds: dict[str, list[float]]) -> None:
    """Time one round; the order alternates."""
    kinds = (plain, saved) if number % 2 == 0 else (saved, plain)
    for kind in kinds:
        for name, spent in kind(root, state, number).items():
            seconds[name].append(spent)


def plain(root: Path, state: list[Array], number: int) -> dict[str, float]:
    """Put and get whole objects."""
    bucket = root.parts[1]
    client, store = open_store(bucket, access_of(bucket, os.environ))
    keys = ["/".join([*root.parts[2:], f"plain-{number}-{rank}"]) for rank in range(len(state))]

    def put(rank: int) -> None:
        client.put(store, keys[rank], memoryview(state[rank]).cast("B"))

    def get(rank: int) -> None:
        assert len(client.get(store, keys[rank]).bytes()) == state[rank].nbytes

    found = {"put": at_once(len(state), put), "get": at_once(len(state), get)}
    client.delete(store, keys)
    return found


def saved(root: Path, state: list[Array], number: int) -> dict[str, float]:
    """Save a checkpoint, verify it, delete it."""
    place = CheckpointRoot(root)
    tensors = [TensorInfo(f"model.rank{rank}", (len(values),), "float32") for rank, values in enumerate(state)]
    began = time.perf_counter()
    staging = place.begin(number + 1, WRITER)

    def write(rank: int) -> list[Piece]:
        writer = PieceWriter(staging, f"rank-{rank:05d}.bin")
        writer.add(tensors[rank], Box.whole(tensors[rank].shape), (0, len(state[rank])), state[rank])
        return writer.close()

    with ThreadPoolExecutor(len(state)) as ranks:
        pieces = [piece for found in ranks.map(write, range(len(state))) for piece in found]
    published = place.publish(staging, Manifest.build(step=number + 1, writer=WRITER, tensors=tensors, pieces=pieces))
    spent = time.perf_counter() - began
    began = time.perf_counter()
    assert verify(root / published.folder_name, published.digest).ok
    read = time.perf_counter() - began
    place.delete(published.folder_name, published.digest)
    return {"save": spent, "verify": read}


def at_once(count: int, work: Callable[[int], None]) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(work, range(count)))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
