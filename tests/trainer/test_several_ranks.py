"""The same run on several ranks and on one: losses, saves, resume; on the CPU over Gloo, on GPUs over NCCL.

Each case of several ranks is a call of its own, with a time limit of its own (`rank_world.py`). A call that hangs
reports the rank and its stack.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.verify import verify
from stoker.model.attend import PackedAttend
from stoker.model.decoder import Decoder
from stoker.model.kernels.kernel_set import resolve_kernels
from stoker.model.kernels.ops import Ops
from stoker.model.weights.source import open_weights
from stoker.pod.causes import Cause
from stoker.trainer.protocol.messages import Event, StepEvent, StopCommand, StragglersEvent
from stoker.trainer.rank.build import RankContext
from stoker.trainer.rank.data.batch import MicroBatch
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import (
    SMALL,
    TINY,
    RecordingChannel,
    SyntheticBatches,
    alone,
    context_of,
    data_parallel,
    tiny_config,
    train,
)

Losses = list[tuple[int, float, float]]
STEPS = 4
CASE_S = 240.0
"""Limit for one case of several ranks, including the compilation of kernels."""
CASES: dict[str, dict[str, Any]] = {
    "any": {},
    "stage 0": {"memory__zero_stage": 0},
    "bf16": {"memory__precision": "bf16"},
    "fp16": {"memory__precision": "fp16"},
    "lamb": {"optimization__optimizer": "lamb"},
    "recompute": {"memory__activation_checkpointing": "full"},
    "same layout": {"training__deterministic": "SameLayout"},
    "plain": {"training__deterministic": "Off"},
    "stage 2": {"memory__zero_stage": 2, "training__deterministic": "SameLayout"},
    "stage 3": {"memory__zero_stage": 3},
    "stage 3, bf16": {"memory__zero_stage": 3, "memory__precision": "bf16"},
    "stage 3, recompute": {"memory__zero_stage": 3, "memory__activation_checkpointing": "full"},
    "stage 3, selective": {"memory__zero_stage": 3, "memory__activation_checkpointing": "selective"},
    "stage 3, serial": {"memory__zero_stage": 3, "training__deterministic": "SameLayout"},
    "one micro-batch": {"training__micro_batch_size": 2, "training__deterministic": "SameLayout"},
}
BITWISE = (
    "any",
    "stage 0",
    "bf16",
    "fp16",
    "lamb",
    "recompute",
    "stage 3",
    "stage 3, bf16",
    "stage 3, recompute",
    "stage 3, selective",
)
"""AnyDataParallel: the same bits whatever the number of ranks."""


@dataclass(frozen=True)
class Ranks:
    """Some ranks of a world, the first `size` of it."""

    world: RankWorld
    size: int
    device: str

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        answers = self.world.call(function, self.size, *args, timeout_s=CASE_S)
        return answers[: self.size]


def make_contexts(sizes: Sequence[int], device: str, rank: int, _world_size: int) -> dict[int, RankContext | None]:
    """Return contexts by size; None where this rank is no member."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return {size: context_of(data_parallel(size), f"cuda:{rank}" if device == "cuda" else device) for size in sizes}


def gpus(size: int) -> list[pytest.MarkDecorator]:
    missing = pytest.mark.skipif(torch.cuda.device_count() < size, reason=f"needs {size} GPUs")
    return [pytest.mark.gpu, missing]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[str, int], RankWorld]]:
    """One world on the CPU, of which two and four ranks are used; one for each number of GPUs."""
    made: dict[tuple[str, int], RankWorld] = {}
    with ExitStack() as stack:

        def world(device: str, size: int) -> RankWorld:
            size, sizes = (4, (2, 4)) if device == "cpu" else (size, (size,))
            if (device, size) not in made:
                backend = "gloo" if device == "cpu" else "nccl"
                setup = partial(make_contexts, sizes, device)
                made[device, size] = stack.enter_context(RankWorld(size, setup, backend=backend))
            return made[device, size]

        yield world


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", 2), id="gloo-2"),
        pytest.param(("cpu", 4), id="gloo-4"),
        pytest.param(("cuda", 2), id="nccl-2", marks=gpus(2)),
        pytest.param(("cuda", 4), id="nccl-4", marks=gpus(4)),
    ],
)
def ranks(request: pytest.FixtureRequest, worlds: Callable[[str, int], RankWorld]) -> Ranks:
    device, size = request.param
    return Ranks(worlds(device, size), size, device)


def run(context: RankContext, folder: Path | str, case: str) -> Losses:
    """Return step, loss and gradient norm of every step that this rank made."""
    context = replace(context, channel=RecordingChannel())
    run_with(context, folder, case)
    return losses(context)


def run_with(context: RankContext, folder: Path | str, case: str, **changes: Any) -> Cause:
    """Run a case; on GPUs with the fused kernels, and in bf16 unless the case has another precision."""
    cuda = context.device.type == "cuda"
    fused = {"kernels": "fused", "attention": "stoker", "memory__precision": "bf16"} if cuda else {}
    fields: dict[str, Any] = {"training__total_steps": STEPS, **fused, **CASES[case], **changes}
    torch.use_deterministic_algorithms(cuda and fields.get("training__deterministic") != "Off")
    try:
        return train(tiny_config(folder, **fields), context, SMALL if cuda else TINY)
    finally:
        torch.use_deterministic_algorithms(False)


def losses(context: RankContext) -> Losses:
    assert isinstance(context.channel, RecordingChannel)
    return [(event.step, event.loss, event.grad_norm) for event in context.channel.all(StepEvent)]


def run_case(contexts: dict[int, RankContext | None], size: int, folder: str, case: str) -> Losses | None:
    context = contexts[size]
    return None if context is None else run(context, folder, case)


@pytest.fixture(scope="module")
def alone_losses(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Losses]:
    found: dict[tuple[str, str], Losses] = {}

    def of(device: str, case: str) -> Losses:
        if (device, case) not in found:
            found[device, case] = run(alone(device), tmp_path_factory.mktemp("alone"), case)
        return found[device, case]

    return of


@pytest.mark.parametrize("case", CASES)
def test_several_ranks_agree_with_one_and_bitwise_in_the_mode_for_it(
    tmp_path: Path, ranks: Ranks, alone_losses: Callable[[str, str], Losses], case: str
) -> None:
    answers = ranks.call(run_case, str(tmp_path), case)
    expected = alone_losses(ranks.device, case)
    if case in BITWISE:
        assert answers == [expected] * ranks.size
    else:
        assert answers == [answers[0]] * ranks.size
        np.testing.assert_allclose(answers[0], expected, rtol=5e-3 if ranks.device == "cuda" else 2e-6)


def test_the_same_layout_repeats_bitwise(tmp_path: Path, ranks: Ranks) -> None:
    first, second = (ranks.call(run_case, str(tmp_path / name), "same layout") for name in ("first", "second"))
    assert first == second


def move(contexts: dict[int, RankContext | None], size: int, folder: str) -> tuple[Cause, Losses] | None:
    """Resume where one rank stopped; the stop after a step comes from the last rank."""
    if (context := contexts[size]) is None:
        return None
    context = replace(context, channel=RecordingChannel())
    if context.mesh.rank == size - 1:
        context.channel.put(StopCommand(mode="suspend"))
    return run_with(context, folder, "any"), losses(context)


def test_a_run_moves_to_several_ranks_and_back_bitwise(
    tmp_path: Path, ranks: Ranks, alone_losses: Callable[[str, str], Losses]
) -> None:
    whole, first = alone_losses(ranks.device, "any"), alone(ranks.device)
    first.channel.put(StopCommand(mode="suspend"))
    assert run_with(first, tmp_path, "any") == Cause.INTERRUPTED
    assert ranks.call(move, str(tmp_path)) == [(Cause.INTERRUPTED, whole[1:2])] * ranks.size
    assert run(alone(ranks.device), tmp_path, "any") == whole[2:]


class UntilNamed(RecordingChannel):
    """Ends the run once rank 1 is named."""

    def send(self, event: Event) -> None:
        super().send(event)
        if isinstance(event, StragglersEvent) and any(found["rank"] == 1 for found in event.stragglers):
            self.put(StopCommand(mode="suspend", save=False))


class LateBatches(SyntheticBatches):
    """Every micro-batch of one rank comes late."""

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        for batch in super().micro_batches(step, dp_rank, dp_size):
            time.sleep(0.05 if dp_rank == 1 else 0)
            yield batch


def train_with_a_late_rank(contexts: dict[int, RankContext | None], size: int, folder: str) -> Cause | None:
    if (context := contexts[size]) is None:
        return None
    config = tiny_config(folder, training__total_steps=1000, training__micro_batch_size=2)
    return train(config, replace(context, channel=UntilNamed()), TINY, LateBatches(config))


def test_the_leading_rank_names_the_rank_that_the_others_wait_for(
    tmp_path: Path, worlds: Callable[[str, int], RankWorld]
) -> None:
    """Other ranks may be named too: on a busy machine some of them get less of it for a while."""
    answers = Ranks(worlds("cpu", 4), 4, "cpu").call(train_with_a_late_rank, str(tmp_path))
    assert answers == [Cause.INTERRUPTED] * 4, "not 1000 steps"


RESIZED = ((4, 2), (2, 3), (4, 5))
"""Ranks of each attempt of an elastic run, and the step after which it ends."""


def resize(contexts: dict[int, RankContext | None], size: int, folder: str, last: int) -> Losses | None:
    """One attempt: the steps up to `last` of a run of `RESIZED`'s length, with a save at its end."""
    if (context := contexts[size]) is None:
        return None
    channel = StopAfter(last if context.mesh.leads else None)
    context = replace(context, channel=channel)
    run_with(context, folder, "any", training__total_steps=RESIZED[-1][1])
    return losses(context)


class StopAfter(RecordingChannel):
    """Asks for a last save while the step `last` is under way."""

    def __init__(self, last: int | None) -> None:
        super().__init__()
        self._last = last

    def send(self, event: Event) -> None:
        super().send(event)
        done = event.step if isinstance(event, StepEvent) else None
        if self._last is not None and done == self._last - 1:
            self.put(StopCommand(mode="suspend"))


def test_a_run_that_shrinks_and_grows_has_the_losses_of_one_that_never_changed(
    tmp_path: Path, worlds: Callable[[str, int], RankWorld]
) -> None:
    """The global batch stays 8: each of four ranks has two sequences of it, each of two has four."""
    world, got = worlds("cpu", 4), []
    for size, last in RESIZED:
        answers = Ranks(world, size, "cpu").call(resize, str(tmp_path / "resized"), last)
        assert answers == [answers[0]] * size
        got += answers[0]
    whole = Ranks(world, 4, "cpu").call(resize, str(tmp_path / "whole"), RESIZED[-1][1])
    assert got == whole[0], "AnyDataParallel: the same bits"
    assert [step for step, _, _ in got] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("case", ["same layout", "stage 0"])
def test_every_rank_writes_its_own_pieces_and_one_loads_them(tmp_path: Path, ranks: Ranks, case: str) -> None:
    ranks.call(run_case, str(tmp_path), case)
    (found,) = CheckpointRoot(tmp_path / "root").committed()
    assert verify(found.path, found.digest).ok
    sizes = [file.stat().st_size for file in sorted(found.path.glob("rank-*.bin"))]
    assert len(sizes) == ranks.size
    assert max(sizes) < 0.75 * sum(sizes)
    assert_loads(found.path, found.digest, ranks.device)


def assert_loads(folder: Path, digest: str, device: str) -> None:
    """Assert that a checkpoint of several ranks loads into one decoder, as an engine loads it."""
    source = open_weights(folder, digest)
    attention = "stoker" if device == "cuda" else "sdpa"
    ops = Ops(resolve_kernels("auto", device))
    decoder = Decoder(source.config, ops, dtype=torch.bfloat16, device=device)
    source.load_into(decoder)
    tokens = torch.arange(24, device=device)
    attend = PackedAttend(decoder.ops, attention, torch.tensor([0, 24], dtype=torch.int32), 24, torch.device(device))
    with torch.no_grad():
        logits = decoder.logits(decoder(tokens, tokens, attend))
    assert logits.shape == (24, source.config.vocab_size)
    assert bool(logits.isfinite().all())
