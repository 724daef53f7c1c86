"""The map between a rank's flat shard and the tensors of a checkpoint.

Three types describe one run of elements, `box[flat[0]:flat[1]]` of a tensor, on its way between device and file:

* `ShardPiece`: where they lie in the shard. Planned once; one for all state kinds (master weight and moments).
* `HostPiece`: their values in host memory, for one state kind. Made by a snapshot, taken by a save.
* `stoker.checkpoint.manifest.Piece`: where they lie in a file. Made by the writer, which cuts at 64 MiB; `flat` is
  `flat_start, flat_end` there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from stoker.checkpoint.manifest import Box, TensorInfo
from stoker.model.parameter import Part
from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.bucket_state import ADAPTER_KINDS, STATE_KINDS
from stoker.trainer.rank.frozen import FrozenState

ALL_KINDS = tuple(dict.fromkeys((*STATE_KINDS, *ADAPTER_KINDS)))
"""Prefixes of the tensors of a checkpoint."""


@dataclass(frozen=True)
class ShardPiece:
    """Elements `[start, end)` of a shard are `box[flat[0]:flat[1]]` of the tensor."""

    name: str
    """Hugging Face name; the tensor in the checkpoint has a state kind in front."""
    shape: tuple[int, ...]
    box: Box
    flat: tuple[int, int]
    start: int
    end: int


@dataclass(frozen=True)
class HostPiece:
    """The values `box[flat[0]:flat[1]]` of a tensor in host memory, owned by the save."""

    tensor: TensorInfo
    box: Box
    flat: tuple[int, int]
    data: NDArray[Any]


def shard_pieces(
    bucket: Bucket, shard: int, parts: Iterable[Part], *, replica: int = 0, replicas: int = 1
) -> list[ShardPiece]:
    """The pieces of the bucket's parameters that shard number `shard` holds, in the order of the shard.

    A parameter without a part in `parts` has none.
    Where `replicas` ranks hold the same shard, the share that number `replica` of them saves.
    """
    of_parameter: dict[int, list[Part]] = {}
    for part in parts:
        of_parameter.setdefault(id(part.parameter), []).append(part)
    first, _ = bucket.plan.shard(shard)
    share = bucket.plan.shard_numel // replicas
    low, high = first + replica * share, first + (replica + 1) * share
    pieces = []
    for item, parameter in zip(bucket.plan.ranges, bucket.parameters, strict=True):
        for part in of_parameter.get(id(parameter), ()):
            begin = item.offset + part.flat_start
            start, stop = max(begin, low), min(begin + part.num_elements, high)
            if start < stop:
                flat = (start - begin, stop - begin)
                box = Box(part.start, part.size)
                pieces.append(ShardPiece(part.hf_name, part.global_shape, box, flat, start - first, stop - first))
    return pieces


def state_tensors(parts: Sequence[Part]) -> list[TensorInfo]:
    """All tensors of the state: fp32 masters and moments; frozen weights in the dtype in which they are used."""
    return [
        TensorInfo(f"{kind}.{part.hf_name}", part.global_shape, dtype_name(part))
        for kind in ALL_KINDS
        for part in parts
        if kind in kinds_of(part)
    ]


def kinds_of(part: Part) -> Sequence[str]:
    """The kinds of state of one tensor of the model."""
    if part.is_adapter:
        return ADAPTER_KINDS
    return STATE_KINDS if part.parameter.requires_grad else FrozenState.kinds


def dtype_name(part: Part) -> str:
    """The dtype of a tensor's state in a checkpoint."""
    return "float32" if part.parameter.requires_grad else str(part.parameter.dtype).removeprefix("torch.")
