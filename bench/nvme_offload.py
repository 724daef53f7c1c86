"""Optimizer state in a file: bytes per second of an update against the plain rate of the volume.

The update is the trainer's (`DiskUpdate` on a `StateFile`): pieces are read, updated and written by its threads. The
plain rate is that of as many threads which read one part of a file and write another at the same time, in blocks of a
piece, past the page cache where the file system allows it. Rounds of both take turns.

    python bench/nvme_offload.py --path /mnt/nvme [--device cuda] [--megabytes 1024] [--rounds 5]

Both figures are GB/s in one direction while the other one runs too. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from stoker.model.kernels.ops import Ops
from stoker.pod.plan.memory import DISK_THREADS, OFFLOAD_PIECE
from stoker.pod.plan.optimizer_time import NVME
from stoker.trainer.protocol.config import OptimizationConfig
from stoker.trainer.rank.bucket import LINE, Bucket
from stoker.trainer.rank.disk_update import DiskUpdate
from stoker.trainer.rank.optimizer import Adam, HeldState, UpdateNumbers
from stoker.trainer.rank.state_file import DiskState, StateFile, aligned_memory

ROWS, FLOAT = 3, 4


class Updates:
    """Updates of one bucket whose state is in a file."""

    def __init__(self, path: str, device: torch.device, numel: int, piece: int) -> None:
        self.file = StateFile(path, 0)
        self._disk = DiskState(self.file, ROWS, numel, piece)
        self._disk.fill(torch.full((ROWS, numel), 0.5))
        kernels = "fused" if device.type == "cuda" else "reference"
        adam = Adam(OptimizationConfig(), Ops(kernels))
        self._adam, self._device, self._step = DiskUpdate(adam, device, piece, self.file), device, 0
        nothing = torch.empty(numel, device="meta")
        self._state = HeldState(
            bucket=Bucket("bucket", [("w", torch.nn.Parameter(torch.empty(numel // LINE, LINE)))], 1),
            start=0,
            master=nothing,
            gradient=torch.full((numel,), 0.1, device=device),
            exp_avg=nothing,
            exp_avg_sq=nothing,
            parameters=torch.zeros(numel, dtype=torch.bfloat16, device=device),
            disk=self._disk,
        )

    def run(self) -> float:
        """Return the seconds of one update, until everything is written."""
        self._step += 1
        scale = torch.ones((), device=self._device)
        begin = time.perf_counter()
        numbers = UpdateNumbers(step=self._step, learning_rate=1e-3, scale=scale)
        self._adam.update([self._state], numbers, lambda _bucket: None)
        self._disk.wait_written()
        return time.perf_counter() - begin


def plain(file: StateFile, offsets: tuple[int, int], size: int, blocks: list[Tensor]) -> float:
    """Return the seconds in which half of the threads read a run of the file while the others write another one."""
    length = blocks[0].nbytes

    def work(number: int) -> None:
        move, offset = (file.read, offsets[0]) if number % 2 else (file.write, offsets[1])
        for begin in range(number // 2 * length, size, length * (DISK_THREADS // 2)):
            move(offset + begin, blocks[number][: (size - begin) // FLOAT])

    begin = time.perf_counter()
    with ThreadPoolExecutor(DISK_THREADS) as threads:
        for done in [threads.submit(work, number) for number in range(DISK_THREADS)]:
            done.result()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="folder on the volume")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--megabytes", type=int, default=1024, help="of state; the volume needs four times as much")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    numel = options.megabytes * 10**6 // (ROWS * FLOAT) // LINE * LINE
    piece = min(OFFLOAD_PIECE, numel // 8 // LINE * LINE)
    size = ROWS * FLOAT * numel
    updates = Updates(options.path, torch.device(options.device), numel, piece)
    offsets = updates.file.reserve(size), updates.file.reserve(size)
    blocks = [aligned_memory(ROWS * piece, pinned=False) for _ in range(DISK_THREADS)]
    plain(updates.file, offsets[::-1], size, blocks)  # what is read has been written
    updates.run()
    seconds: dict[str, list[float]] = {"plain": [], "update": []}
    for _ in range(options.rounds):
        seconds["plain"].append(plain(updates.file, offsets, size, blocks))
        seconds["update"].append(updates.run())
    updates.file.close()
    rates = {name: round(size / 1e9 / statistics.median(values), 3) for name, values in seconds.items()}
    ratio = rates["update"] / rates["plain"]
    print(f"{size / 1e9:.2f} GB each way: plain {rates['plain']} GB/s, update {rates['update']} GB/s ({ratio:.2f})")
    facts = {
        "bench": "nvme_offload",
        "device": options.device,
        "bytes": size,
        "cpus": os.cpu_count(),
        "seconds": seconds,
    }
    print(json.dumps({**facts, "gb_per_s": rates, "ratio": round(ratio, 3), "plan_gb_per_s": NVME / 1e9}))


if __name__ == "__main__":
    main()
