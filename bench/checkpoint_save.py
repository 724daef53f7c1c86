"""Checkpoint save against a plain write of the same bytes.

All write the same buffers to the same disk and end durable (fsync):
  plain   one file, `write` and one `fsync` at the end: what a program does that does not think about it
  pushed  the same through the storage of the format, which pushes to the disk while it writes, without hashes
  save    a whole save: hashes, manifest, proof of exact cover, publish
Run: python bench/checkpoint_save.py [--megabytes 1024] [--rounds 5] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from stoker.checkpoint.manifest import Box, Manifest, TensorInfo
from stoker.checkpoint.storage import PosixSink
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.writer import PieceWriter

State = list[tuple[TensorInfo, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]]


def main() -> None:
    options = arguments()
    state = make_state(options.megabytes)
    total = sum(tensor.bytes for tensor, _ in state)
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-save-", dir=options.folder))
    try:
        result = measure(folder, state, options.rounds)
    finally:
        shutil.rmtree(folder)
    median_s = {kind: statistics.median(seconds) for kind, seconds in result.items()}
    speeds = ", ".join(f"{kind} {total / seconds / 1e6:.0f} MB/s" for kind, seconds in median_s.items())
    ratio, hashing = median_s["plain"] / median_s["save"], median_s["pushed"] / median_s["save"]
    print(f"{total / 1e9:.2f} GB, {len(state)} tensors, {options.rounds} rounds: {speeds}")
    print(f"save against plain {ratio:.2f} (goal 0.80), against pushed without hashes {hashing:.2f}")
    facts = {"bench": "checkpoint_save", "bytes": total, "cpus": os.cpu_count(), "ratio": round(ratio, 3)}
    print(json.dumps(facts | {"ratio_to_pushed": round(hashing, 3), "seconds": result}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all three, each in another order")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the temporary folder)")
    return parser.parse_args()


def make_state(megabytes: int) -> State:
    """Return tensors like a transformer's: most bytes in matrices, a few small vectors."""
    random = np.random.default_rng(0)
    state: State = []
    for layer in range(max(megabytes // 32, 1)):
        for name, shape in (("w", (4096, 2047)), ("norm", (2048,)), ("bias", (2048,))):
            values = random.standard_normal(shape, dtype=np.float32)
            state.append((TensorInfo(f"model.{layer}.{name}", shape, "float32"), values))
    return state


def measure(folder: Path, state: State, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round. The three change places, so that none always meets the emptier page cache."""
    kinds: list[tuple[str, Callable[[Path, State], None]]] = [
        ("plain", write_plain),
        ("pushed", write_pushed),
        ("save", save),
    ]
    seconds: dict[str, list[float]] = {kind: [] for kind, _ in kinds}
    for number in range(rounds + 1):
        for kind, action in kinds[number % 3 :] + kinds[: number % 3]:
            os.sync()
            begin = time.perf_counter()
            action(folder / kind, state)
            elapsed = time.perf_counter() - begin
            shutil.rmtree(folder / kind)
            if number:  # the first round warms the disk up
                seconds[kind].append(round(elapsed, 4))
    return seconds


def write_plain(folder: Path, state: State) -> None:
    folder.mkdir()
    handle = os.open(folder / "plain.bin", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for _, values in state:
        view = values.data.cast("B")
        while view:
            view = view[os.write(handle, view) :]
    os.fsync(handle)
    os.close(handle)


def write_pushed(folder: Path, state: State) -> None:
    folder.mkdir()
    sink = PosixSink(folder / "plain.bin")
    for _, values in state:
        view = values.data.cast("B")
        for start in range(0, len(view), 2**20):
            sink.write(view[start : start + 2**20])
    sink.sync()
    sink.close()


def save(folder: Path, state: State) -> None:
    root = CheckpointRoot(folder)
    staging = root.begin(1, "00000000")
    writer = PieceWriter(staging, "rank-00000.bin")
    for tensor, values in state:
        writer.add(tensor, Box.whole(tensor.shape), (0, values.size), values)
    tensors = [tensor for tensor, _ in state]
    root.publish(staging, Manifest.build(step=1, writer="00000000", tensors=tensors, pieces=writer.close()))


if __name__ == "__main__":
    main()
