"""The state of a rank between its tensors and a checkpoint: snapshot to host memory, and loading from a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stoker.checkpoint.dtype import to_float32
from stoker.checkpoint.errors import CheckpointError
from stoker.checkpoint.manifest import TensorInfo
from stoker.checkpoint.reader import CheckpointReader
from stoker.model.parameter import Part
from stoker.trainer.piece_map import shard_pieces, state_names
from stoker.trainer.saver import HostPiece
from stoker.trainer.zero import STATE_KINDS, BucketState, Zero


def state_tensors(parts: Sequence[Part]) -> list[TensorInfo]:
    """Every tensor of the whole state: fp32 masters and moments."""
    return [TensorInfo(name, shape, "float32") for name, shape in state_names(parts).items()]


def host_pieces(zero: Zero, parts: Sequence[Part]) -> list[HostPiece]:
    """A copy of this rank's shards, cut by tensor. Later updates do not reach it."""
    pieces = []
    for state in zero.states:
        host = {kind: _to_host(shard) for kind, shard in state.shards().items()}
        for item in shard_pieces(state.bucket, zero.communicator.rank, parts):
            for kind in STATE_KINDS:
                tensor = TensorInfo(f"{kind}.{item.name}", item.shape, "float32")
                pieces.append(HostPiece(tensor, item.box, item.flat, host[kind][item.start : item.end].numpy()))
    return pieces


def load_state(
    zero: Zero, parts: Sequence[Part], reader: CheckpointReader, kinds: Sequence[str], report: Callable[[str], None]
) -> None:
    """Fill masters (and moments, when `kinds` names them) from a checkpoint, each rank its shards, then the parameters (collective).

    Raises:
        CheckpointError: the checkpoint is of another model; nothing was changed.
        CheckpointCorrupt: a piece is damaged.
    """
    check_same_model(reader, parts, kinds)
    done = 0

    def fill(state: BucketState, shards: dict[str, Tensor]) -> None:
        nonlocal done
        for item in shard_pieces(state.bucket, zero.communicator.rank, parts):
            for kind in kinds:
                name = f"{kind}.{item.name}"
                values = to_float32(reader.read(name, item.box, item.flat), reader.tensor(name).dtype)
                shards[kind][item.start : item.end].copy_(torch.from_numpy(values))
        done += 1
        report(f"LoadingCheckpoint {100 * done // len(zero.states)} %")

    zero.set_shards(fill)


def check_same_model(reader: CheckpointReader, parts: Sequence[Part], kinds: Sequence[str]) -> None:
    """Refuse a checkpoint whose tensors are not those of this model."""
    wanted = {
        name: shape
        for name, shape in state_names(parts).items()
        if name.startswith(tuple(f"{kind}." for kind in kinds))
    }
    have = {name: info.shape for name, info in reader.manifest.tensors.items()}
    problems = [
        f"{name} {shape} is {have.get(name, 'missing')}" for name, shape in wanted.items() if have.get(name) != shape
    ]
    surplus = [name for name in have if name.startswith("model.") and name not in wanted]
    problems += [f"{name} {have[name]} is not in the model" for name in surplus]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{reader.folder} is a checkpoint of another model: {'; '.join(problems[:3])}{more}")


def _to_host(shard: Tensor) -> Tensor:
    return shard.detach().to("cpu", copy=True)
