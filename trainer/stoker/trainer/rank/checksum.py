"""The guard against silent damage: checksums of what several ranks hold alike.

Weights that are not sharded are the same bits on all ranks that see different data; a shard is the same on the ranks
of the replicate axis. A mismatch names the ranks. Called by the loop; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stoker.trainer.errors import StateDiverged
from stoker.trainer.protocol.parallel_dims import Axis, ParallelDims, Ranks
from stoker.trainer.rank.bucket import Reduction
from stoker.trainer.rank.bucket_state import BucketState, HeldBucket
from stoker.trainer.rank.zero import Zero

CHUNK = 1 << 20
"""Elements that are widened at a time."""
PRIME = 65521
KINDS: tuple[Reduction, ...] = ("dense", "replicated", "expert")
DATA_AXES: tuple[Axis, ...] = ("replicate", "context", "shard")
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas(zero: Zero, step: int) -> None:
    """Compare the state that ranks hold alike (collective; waits for the device).

    Raises:
        StateDiverged: on every rank; the message names those that differ from the others.
    """
    zero.wait_parameters()
    mine = torch.stack([_checksum_of_kind(zero, kind) for kind in KINDS])
    by_rank = zero.mesh.world.exchange(mine).tolist()
    problems = find_mismatches(by_rank, holders(zero.mesh.dims, zero.settings.stage))
    if problems:
        raise StateDiverged(f"step {step}: {'; '.join(problems)}")


def holders(dims: ParallelDims, stage: int) -> dict[Reduction, list[Ranks]]:
    """The groups of ranks that hold the same bits, by kind of parameter."""
    replicas: list[Ranks] = dims.groups("replicate")
    return {
        "dense": replicas if stage == 3 else dims.groups(*DATA_AXES),
        "replicated": dims.groups(*DATA_AXES, "tensor"),  # whole at every stage
        "expert": replicas if stage == 3 else dims.expert_replicas(),
    }


def find_mismatches(by_rank: Sequence[Sequence[int]], groups: Mapping[Reduction, Sequence[Ranks]]) -> list[str]:
    """One line for each group whose checksums differ. `by_rank`: the checksum of each kind, in the order of `KINDS`."""
    problems = []
    for index, kind in enumerate(KINDS):
        for ranks in groups[kind]:
            values = {rank: by_rank[rank][index] for rank in ranks}
            (usual, count), *others = Counter(values.values()).most_common()
            if not others:
                continue
            odd = [rank for rank, value in values.items() if value != usual]
            rest = [rank for rank in ranks if rank not in odd]
            if count > len(ranks) // 2:
                problems.append(f"the {kind} weights of {_ranks(odd)} differ from those of {_ranks(rest)}")
            else:
                problems.append(f"the {kind} weights of {_ranks(ranks)} differ, and no majority of them agrees")
    return problems


def checksum(flat: Tensor) -> Tensor:
    """int64 scalar on the device: depends on every bit and on the place of every element."""
    bits = flat.detach().reshape(-1).view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, bits.numel(), CHUNK):
        wide = bits[start : start + CHUNK].to(torch.int64)
        places = torch.arange(start, start + wide.numel(), device=flat.device) % PRIME + 1
        total += (wide * places).sum()
    return total


def _checksum_of_kind(zero: Zero, kind: Reduction) -> Tensor:
    """The buckets' checksums together, each with its own factor."""
    total = torch.zeros((), dtype=torch.int64, device=zero.states[0].bucket.device)
    for number, state in enumerate(zero.held):
        if state.bucket.reduction == kind:
            for held in _held_alike(state, zero.settings.stage):
                total = total * 31 + (number + 1) * checksum(held).to(total.device)
    return total


def _held_alike(state: HeldBucket, stage: int) -> list[Tensor]:
    if stage == 0 and isinstance(state, BucketState):
        state.wait_host()
        return [*state.held(), state.bucket.flat]
    return [state.weights if state.shards_weights else state.bucket.flat]


def _ranks(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks))
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
