"""Synthetic state and the layouts that shard it, shared by the tests of the checkpoint format."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.checkpoint.dtype import NUMPY, Array
from stoker.checkpoint.manifest import Box, FileEntry, Manifest, Piece, TensorInfo
from stoker.checkpoint.storage import Storage
from stoker.checkpoint.store import CheckpointRoot, Published
from stoker.checkpoint.writer import PieceWriter, write_file

WRITER = "0a1b2c3d"


@dataclass(frozen=True)
class Shard:
    """One rank's part of one tensor: a flat range inside a box."""

    tensor: TensorInfo
    box: Box
    flat: tuple[int, int]


State = Mapping[str, tuple[TensorInfo, Array]]
Cut = Callable[[list[TensorInfo], int], list[list[Shard]]]


def make_state(shapes: Mapping[str, tuple[tuple[int, ...], str]], seed: int = 0) -> State:
    """Return random bits of the given dtypes; every bit pattern may occur, NaN included."""
    random = np.random.default_rng(seed)
    state = {}
    for name, (shape, dtype) in shapes.items():
        raw = random.bytes(math.prod(shape) * NUMPY[dtype].itemsize)
        state[name] = (TensorInfo(name, shape, dtype), np.frombuffer(raw, NUMPY[dtype]).reshape(shape))
    return state


SMALL: Mapping[str, tuple[tuple[int, ...], str]] = {
    "model.embed.weight": ((13, 6), "float32"),
    "model.norm.weight": ((7,), "float32"),
    "model.attention.weight": ((6, 5), "bfloat16"),
    "model.experts": ((3, 5, 4), "float16"),
    "optimizer.exp_avg.embed": ((13, 6), "float32"),
    "optimizer.count": ((), "int64"),
    "model.empty": ((0, 4), "float32"),
}


def whole(tensors: list[TensorInfo], ranks: int) -> list[list[Shard]]:
    """Return a layout in which rank 0 holds everything."""
    first = [Shard(tensor, box, (0, box.volume)) for tensor in tensors for box in [Box.whole(tensor.shape)]]
    return [first, *([] for _ in range(ranks - 1))]


def flat_bucket(tensors: list[TensorInfo], ranks: int) -> list[list[Shard]]:
    """Return a data-parallel layout: all tensors in one flat bucket, cut into equal ranges.

    Some ranks get nothing.
    """
    return bucket([(tensor, Box.whole(tensor.shape)) for tensor in tensors], ranks)


def bucket(parts: list[tuple[TensorInfo, Box]], ranks: int) -> list[list[Shard]]:
    share = -(-sum(box.volume for _, box in parts) // ranks)
    shards: list[list[Shard]] = []
    for rank in range(ranks):
        mine, position = [], 0
        for tensor, box in parts:
            first = min(max(rank * share - position, 0), box.volume)
            end = min(max((rank + 1) * share - position, 0), box.volume)
            mine.append(Shard(tensor, box, (first, end)))
            position += box.volume
        shards.append(mine)
    return shards


def along(dim: int) -> Cut:
    """Return a layout that cuts every tensor along one dim, in near-equal parts.

    Tensors without that dim belong to rank 0.
    """

    def cut(tensors: list[TensorInfo], ranks: int) -> list[list[Shard]]:
        return [
            [Shard(tensor, box, (0, box.volume)) for tensor, box in boxes_along(tensors, dim, ranks, rank)]
            for rank in range(ranks)
        ]

    return cut


def boxes_along(tensors: list[TensorInfo], dim: int, ranks: int, rank: int) -> list[tuple[TensorInfo, Box]]:
    boxes = []
    for tensor in tensors:
        if dim < len(tensor.shape):
            extent = tensor.shape[dim]
            first, end = extent * rank // ranks, extent * (rank + 1) // ranks
            start = tuple(first if axis == dim else 0 for axis in range(len(tensor.shape)))
            size = tuple(end - first if axis == dim else value for axis, value in enumerate(tensor.shape))
            boxes.append((tensor, Box(start, size)))
        elif rank == 0:
            boxes.append((tensor, Box.whole(tensor.shape)))
    return boxes


def both(tensors: list[TensorInfo], ranks: int) -> list[list[Shard]]:
    """Return a tensor-parallel layout along dim 1 (two groups) whose boxes are cut by data-parallel ranges."""
    groups = 2 if ranks > 1 else 1
    shards: list[list[Shard]] = []
    for group in range(groups):
        members = ranks // groups + (ranks % groups if group == 0 else 0)
        shards += bucket(boxes_along(tensors, 1, groups, group), members)
    return shards


LAYOUTS: dict[str, Cut] = {
    "whole": whole,
    "flat ranges": flat_bucket,
    "dim 0": along(0),
    "dim 1": along(1),
    "both": both,
}


def part(values: Array, shard: Shard) -> Array:
    """Return a shard's elements, flat, in a contiguous array."""
    box = Box.whole(values.shape)
    return np.ascontiguousarray(values[shard.box.slices_in(box)]).reshape(-1)[shard.flat[0] : shard.flat[1]]


def save(
    root: CheckpointRoot,
    state: State,
    *,
    step: int = 1,
    writer: str = WRITER,
    cut: Cut = whole,
    ranks: int = 1,
    piece_bytes: int = 64,
    files: Mapping[str, bytes] | None = None,
    meta: Mapping[str, Any] | None = None,
) -> Published:
    """Save as a program does: every rank its pieces, rank 0 the manifest."""
    staging = root.begin(step, writer)
    tensors = [tensor for tensor, _ in state.values()]
    pieces: list[Piece] = []
    for rank, shards in enumerate(cut(tensors, ranks)):
        pieces += write_rank(staging, rank, shards, state, piece_bytes, root.storage)
    entries: list[FileEntry] = [
        write_file(staging, name, data, storage=root.storage) for name, data in (files or {}).items()
    ]
    manifest = Manifest.build(step=step, writer=writer, tensors=tensors, pieces=pieces, files=entries, meta=meta)
    return root.publish(staging, manifest)


def write_rank(
    staging: Path, rank: int, shards: list[Shard], state: State, piece_bytes: int, storage: Storage
) -> list[Piece]:
    with PieceWriter(staging, f"rank-{rank:05d}.bin", storage=storage, piece_bytes=piece_bytes) as writer:
        for shard in shards:
            writer.add(shard.tensor, shard.box, shard.flat, part(state[shard.tensor.name][1], shard))
        return writer.close()


def same_bits(first: Array, second: Array) -> bool:
    """Return whether arrays are equal bit for bit: NaN equals itself, -0 does not equal 0."""
    return first.shape == second.shape and first.dtype == second.dtype and first.tobytes() == second.tobytes()
