"""Collectives by copies: against the sums and gathers that they stand for, in any timing of the ranks; on GPUs against
NCCL's, bit for bit.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from stoker.trainer.rank.communicator import DONE, Communicator, Groups, Pending
from stoker.trainer.rank.communicator_maker import GpuShare, make_communicator
from stoker.trainer.rank.copy_engines import STEP_BYTES, CopyEngines
from stoker.trainer.rank.ordered_sum import sum_in_order
from testing.trainer.rank_world import RankWorld

ROUNDS = 12
LONGEST = 4096


class Shared:
    """What the threads of a lane share: memory of each rank, and where they meet."""

    def __init__(self, size: int) -> None:
        self.memories = [torch.zeros(LONGEST * 4, dtype=torch.uint8) for _ in range(size)]
        self.meeting = threading.Barrier(size)


class ThreadLane:
    """A lane of one thread, which is late by a little wherever it can be."""

    def __init__(self, shared: Shared, seed: int) -> None:
        self._shared, self._random = shared, random.Random(seed)

    def begin(self, num_bytes: int) -> AbstractContextManager[object]:
        assert num_bytes <= self._shared.memories[0].numel()
        self._dawdle()
        return nullcontext()

    def memory(self, rank: int, like: Tensor) -> Tensor:
        self._dawdle()
        return self._shared.memories[rank][: like.nbytes].view(like.dtype)

    def meet(self) -> None:
        self._dawdle()
        self._shared.meeting.wait(60.0)

    def end(self) -> Pending:
        return DONE

    def _dawdle(self) -> None:
        if self._random.random() < 0.5:
            time.sleep(self._random.random() / 500)


def values(size: int, rank: int, turn: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """A rank's buffer in one round; all ranks' are of one length."""
    length = size * random.Random(turn).randint(1, LONGEST // size)
    generator = torch.Generator().manual_seed(100 * turn + rank)
    return torch.randn(length, generator=generator).to(device, dtype)


def reduced(communicator: Communicator, turn: int, dtype: torch.dtype) -> Tensor:
    """What a rank gets in one round; every third is added to what was there, every fourth written into the buffer."""
    flat = values(communicator.size, communicator.rank, turn, dtype)
    in_place = dtype == torch.float32 and turn % 4 == 0
    out = communicator.shard(flat) if in_place else torch.ones(flat.numel() // communicator.size)
    communicator.reduce_scatter(flat, out, add=not in_place and turn % 3 == 0).wait()
    return out


def expected_sum(size: int, rank: int, order: tuple[int, ...], turn: int, dtype: torch.dtype) -> Tensor:
    rows = [values(size, other, turn, dtype).view(size, -1)[rank] for other in order]
    out = torch.ones(rows[0].numel())
    in_place = dtype == torch.float32 and turn % 4 == 0
    sum_in_order([row.clone() for row in rows], out, add=not in_place and turn % 3 == 0)
    return out


def gathered(communicator: Communicator, turn: int, dtype: torch.dtype) -> Tensor:
    flat = values(communicator.size, communicator.rank, turn, dtype)
    communicator.all_gather(flat).wait()
    return flat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0, 2), (0, 1, 2, 3)], ids=str)
def test_ranks_that_dawdle_reduce_and_gather_the_same_values(order: tuple[int, ...], dtype: torch.dtype) -> None:
    size = len(order)
    reductions, gathers = Shared(size), Shared(size)
    groups = Groups(cast("Any", None), cast("Any", None), order)

    def rounds(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        lanes = (ThreadLane(shared, seed) for seed, shared in ((rank, reductions), (10 + rank, gathers)))
        mine = CopyEngines(rank, size, groups, *lanes)
        return tuple([kind(mine, turn, dtype) for turn in range(ROUNDS)] for kind in (reduced, gathered))  # type: ignore[return-value]

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(rounds, range(size)))
    for turn in range(ROUNDS):
        slices = [values(size, rank, turn, dtype).view(size, -1)[rank] for rank in range(size)]
        for rank in range(size):
            totals, wholes = found[rank]
            assert torch.equal(totals[turn], expected_sum(size, rank, order, turn, dtype)), (rank, turn)
            assert torch.equal(wholes[turn], torch.cat(slices)), (rank, turn)


# On GPUs

Pair = tuple[Communicator, Communicator]


def open_both(rank: int, size: int) -> Pair:
    device = torch.device("cuda", rank)
    made = [make_communicator(range(size), device, share=GpuShare(copies=copies)) for copies in (True, False)]
    assert isinstance(made[0], CopyEngines)
    return cast("Pair", tuple(made))


def same_bits(pair: Pair, longest: int) -> list[bool]:
    """Reduce and gather by both ways, all in flight at once, beside products; whether each had the same bits."""
    device = torch.device("cuda", torch.cuda.current_device())
    busy = torch.randn(2048, 2048, device=device)
    inputs = [buffer(pair[0], turn, longest, device) for turn in range(8)]
    found = []
    for communicator in pair:
        pending, results = [], []
        for turn, flat in enumerate(inputs):
            sent, whole = flat.clone(), flat.clone()
            out = torch.ones(flat.numel() // communicator.size, device=device)
            results.append((out, whole))
            pending.append(communicator.reduce_scatter(sent, out, add=turn % 2 == 1))
            pending.append(communicator.all_gather(whole))
            busy = torch.tanh(busy @ busy)
        for one in pending:
            one.wait()
        found.append(results)
    torch.cuda.synchronize(device)
    return [all(map(torch.equal, ours, theirs)) for ours, theirs in zip(*found, strict=True)]


def buffer(communicator: Communicator, turn: int, longest: int, device: torch.device) -> Tensor:
    """Longer in every second turn, so that a lane's memory grows between others."""
    generator = torch.Generator(device).manual_seed(100 * turn + communicator.rank)
    length = communicator.size * 1024 * random.Random(turn).randint(1, longest)
    return torch.randn(length, generator=generator, device=device).to(torch.bfloat16)


@pytest.fixture(scope="module")
def world() -> Iterator[Callable[..., list[list[bool]]]]:
    with RankWorld(min(torch.cuda.device_count(), 4), open_both, backend="nccl") as world:
        yield world.call


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("longest", [64, 2 * STEP_BYTES // 2048], ids=["short", "long"])
def test_copies_give_the_bits_of_nccl(world: Callable[..., list[list[bool]]], longest: int) -> None:
    assert all(map(all, world(same_bits, longest, timeout_s=120.0)))
