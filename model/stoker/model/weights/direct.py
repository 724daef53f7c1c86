"""Weights from safetensors files straight into parameters, read by threads.

For a GPU they read into pinned memory, which is copied while the next run of bytes is read.

Nothing is mapped and nothing is converted: a part whose dtype differs from the file's, or whose box is not one run of
bytes, is left to `load_part`.

Called by `hugging_face`; fills the parameters of a decoder in place.
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from stoker.model.parameter import Part
from stoker.model.weights.loading import TensorStore, WeightsError, load_part

RUN_BYTES = 16 * 2**20
"""Bytes read at once."""
NUM_THREADS = 8
BUFFERS = 2
"""Pinned buffers of one thread: one is read into while the other is copied from."""


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor in a file."""

    file: Path
    offset: int
    num_bytes: int
    dtype: str
    """safetensors' name."""


@dataclass(frozen=True)
class ByteRun:
    """Bytes `[offset, offset + len(target))` of a file, and where they go."""

    file: Path
    offset: int
    target: Tensor
    """uint8 [T], contiguous."""


Read = Callable[[ByteRun], None]


def tensor_places(files: Iterable[Path]) -> dict[str, TensorPlace]:
    """Return the place of every tensor. safetensors has opened the files before, which checks their headers."""
    places: dict[str, TensorPlace] = {}
    for file in files:
        with file.open("rb") as opened:
            (header_bytes,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                places[name] = TensorPlace(file, 8 + header_bytes + begin, end - begin, entry["dtype"])
    return places


@torch.no_grad()
def load_direct(
    parts: Iterable[Part],
    places: dict[str, TensorPlace],
    store: TensorStore,
    names: dict[torch.dtype, str],
    progress: Callable[[int, int], None] | None = None,
    *,
    run_bytes: int = RUN_BYTES,
) -> None:
    """Fill parts that fit the store.

    `names`: safetensors' names of dtypes. `run_bytes`: at most RUN_BYTES. Raises WeightsError where a file ends early.
    """
    runs: list[ByteRun] = []
    for part in parts:
        found = list(part_runs(part, places[part.hf_name], names, run_bytes))
        if not found:
            load_part(part, store)
        runs += found
    if not runs:
        return
    # Experts may be in host memory beside parameters on a GPU.
    device = next((run.target.device for run in runs if run.target.is_cuda), runs[0].target.device)
    if (
        device.type == "cuda"
    ):  # the threads copy on streams of their own: not before earlier work on that memory is over
        torch.cuda.synchronize(device)
    total, done = sum(len(run.target) for run in runs), 0
    reader = reader_on(device)
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights") as pool:
        for run, _ in zip(runs, pool.map(reader, runs), strict=True):
            done += len(run.target)
            if progress is not None:
                progress(done, total)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def part_runs(part: Part, place: TensorPlace, names: dict[torch.dtype, str], run_bytes: int) -> Iterator[ByteRun]:
    """Yield the part as runs of the file; none where it must be converted or gathered."""
    local = part.local()
    whole_rows = part.size[1:] == part.global_shape[1:]
    if names.get(local.dtype) != place.dtype or not whole_rows or not local.is_contiguous():
        return
    row_bytes = math.prod(part.global_shape[1:]) * local.element_size()
    first = place.offset + part.start[0] * row_bytes
    target_T = local.reshape(-1).view(torch.uint8)
    for begin in range(0, len(target_T), run_bytes):
        yield ByteRun(place.file, first + begin, target_T[begin : begin + run_bytes])


def reader_on(device: torch.device) -> Read:
    """Return a function that reads runs to this device or to host memory; several threads call it."""
    if device.type != "cuda":
        return lambda run: read_into(run, run.target)
    own = threading.local()

    def read(run: ByteRun) -> None:
        if not run.target.is_cuda:
            read_into(run, run.target)
            return
        if not hasattr(own, "lane"):
            own.lane = Lane(device)
        own.lane.read(run)

    return read


class Lane:
    """One thread's pinned buffers and stream."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.buffers = [torch.empty(RUN_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        self.copied: list[torch.cuda.Event] = [torch.cuda.Event() for _ in range(BUFFERS)]  # type: ignore[no-untyped-call]
        self.turn = 0

    def read(self, run: ByteRun) -> None:
        """Read a run; return when its bytes are on their way."""
        buffer, copied = self.buffers[self.turn], self.copied[self.turn]
        self.turn = (self.turn + 1) % BUFFERS
        copied.synchronize()
        buffer = buffer[: len(run.target)]
        read_into(run, buffer)
        with torch.cuda.stream(self.stream):
            run.target.copy_(buffer, non_blocking=True)
            copied.record(self.stream)


def read_into(run: ByteRun, buffer: Tensor) -> None:
    """Fill host memory; the interpreter's lock is not held while reading."""
    memory = memoryview(buffer.numpy())  # type: ignore[arg-type]
    done = 0
    descriptor = os.open(run.file, os.O_RDONLY)
    try:
        while done < len(memory):
            count = os.preadv(descriptor, [memory[done:]], run.offset + done)
            if count == 0:
                raise WeightsError(f"{run.file} ends at byte {run.offset + done}, inside a tensor")
            done += count
    finally:
        os.close(descriptor)
