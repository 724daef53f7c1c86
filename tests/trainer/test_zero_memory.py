"""Memory of one rank, stage by stage, as the theory says, alone and in a pipeline; and the gathers of stage 3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.pod.pipeline.actions import ScheduleName, Shape
from stoker.pod.pipeline.schedules import compute_order
from stoker.trainer.protocol.parallel_dims import ParallelDims
from stoker.trainer.protocol.step_signals import StepSignals
from stoker.trainer.rank.bucket import Bucket
from stoker.trainer.rank.build import RankContext, make_passes
from stoker.trainer.rank.communicator import DONE, Pending
from stoker.trainer.rank.gathered_weights import BUFFERS, GatheredWeights, ShardedBucket
from stoker.trainer.rank.mesh import AxisGroups
from stoker.trainer.rank.ordered_sum import sum_in_order
from stoker.trainer.rank.pipeline.stage import Stage
from stoker.trainer.rank.train_step import TrainStep
from stoker.trainer.rank.zero import WIRE_DEPTH
from stoker.trainer.rank.zero_maker import make_zero
from testing.trainer.live_bytes import LiveBytes
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import TINY, SyntheticBatches, context_of, data_parallel, empty_slices, tiny_config

RANKS, STEPS, MICRO_BATCHES = 4, 2, 2
DEEP = replace(TINY, hidden_size=128, intermediate_size=256, num_layers=6, head_dim=32)
"""Much larger than the activations of one micro-batch, and than one of its buckets."""
DEEPER = replace(DEEP, num_layers=10)
"""For two stages: half of a stage's weights are more than the two units that are gathered at once."""


class Measured(NamedTuple):
    bytes: list[int]
    """After each step: no activation lives."""
    peak: int
    numels: list[int]
    """Padded sizes of the buckets: embedding, blocks, head."""


PIPELINE = ParallelDims(pipeline=2, shard=2)
"""The grid of the same ranks as a pipeline of two stages."""


def contexts(_rank: int, _size: int) -> dict[ParallelDims, RankContext | None]:
    groups = AxisGroups(torch.device("cpu"))
    return {dims: context_of(dims, groups=groups) for dims in (data_parallel(RANKS), PIPELINE)}


def measure(contexts: dict[ParallelDims, RankContext | None], dims: ParallelDims, stage: int) -> Measured:
    held = contexts[dims]
    assert held is not None
    config = tiny_config(
        memory__zero_stage=stage,
        memory__precision="bf16",
        training__deterministic="SameLayout",
        training__global_batch_size=dims.data_parallel * MICRO_BATCHES,
        parallelism__pipeline=dims.pipeline,
        parallelism__pipeline_schedule="ZeroBubble",
    )
    with LiveBytes() as live:
        decoder, start = empty_slices(config, held, DEEP if dims.pipeline == 1 else DEEPER)
        zero = make_zero(config, decoder, held.mesh, held.device, start.fill)
        del start
        step = TrainStep(make_passes(config, held, decoder, zero), zero, 1.0)
        batches = SyntheticBatches(config)
        found = []
        for number in range(STEPS):
            live.restart_peak()
            own = batches.micro_batches(number, held.mesh.data_index, dims.data_parallel)
            step(number + 1, own, MICRO_BATCHES, batches.target_tokens(number), 1e-3, StepSignals)
            zero.wait_parameters()
            found.append(live.settled())
    zero.close()
    return Measured(found, live.peak, [state.bucket.plan.numel for state in zero.states])


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(RANKS, contexts) as made:
        yield made


@pytest.fixture(scope="module")
def measured(world: RankWorld) -> dict[int, Measured]:
    return {stage: world.call(measure, data_parallel(RANKS), stage)[0] for stage in range(4)}


@pytest.fixture(scope="module")
def piped(world: RankWorld) -> dict[int, list[Measured]]:
    return {stage: world.call(measure, PIPELINE, stage) for stage in (1, 2, 3)}


def theory(stage: int, numels: list[int], ranks: int = RANKS) -> int:
    """Bytes of one rank: fp32 master and moments, bf16 weights, the fp32 gradient, and what is in flight."""
    total, shard = sum(numels), sum(numels) // ranks
    state = 12 * (shard if stage else total)
    weights = 2 * (shard + BUFFERS * max(numels)) if stage == 3 else 2 * total
    gradient = 4 * (shard if stage >= 2 else total)
    # A send and a receive buffer for each bucket in flight (embedding and head have their own size); Gloo's, before.
    sent = (WIRE_DEPTH + 1) * max(numels, key=numels.count) + sum(set(numels)) - max(numels, key=numels.count)
    in_flight = 2 * 2 * sent if stage >= 2 else 4 * total
    return state + weights + gradient + in_flight


@pytest.mark.parametrize("stage", range(4))
def test_a_rank_holds_what_the_theory_says(measured: dict[int, Measured], stage: int) -> None:
    found = measured[stage]
    expected = theory(stage, found.numels)
    rest = 100_000  # rotary table, squares, losses
    assert abs(found.bytes[-1] - expected) <= 0.05 * expected + rest


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_of_a_pipeline_holds_what_the_theory_says_of_its_stage(
    piped: dict[int, list[Measured]], stage: int, rank: int
) -> None:
    found = piped[stage][rank]
    expected = theory(stage, found.numels, PIPELINE.shard)
    rest = 100_000 + 2 * MICRO_BATCHES * 24 * 128 * 4  # and the messages between stages, which keep their buffers
    assert abs(found.bytes[-1] - expected) <= 0.05 * expected + rest
    assert found.bytes[-1] == found.bytes[-2]
    assert stage == 1 or found.bytes[-1] < piped[stage - 1][rank].bytes[-1]


@pytest.mark.parametrize("stage", range(4))
def test_no_memory_is_added_from_step_to_step(measured: dict[int, Measured], stage: int) -> None:
    assert measured[stage].bytes[-1] == measured[stage].bytes[-2]


def test_each_stage_needs_less_than_the_one_before(measured: dict[int, Measured]) -> None:
    peaks = [measured[stage].peak for stage in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


class Recorder:
    """Two ranks as the first one sees them; gathers are recorded and end when they are waited for."""

    rank, size, eager, replicas, replica = 0, 2, False, 1, 0

    def __init__(self) -> None:
        self.events: list[str] = []
        self.names: dict[int, str] = {}

    def shard(self, flat: Tensor) -> Tensor:
        return flat.view(2, -1)[0]

    def all_gather(self, flat: Tensor) -> Pending:
        value = float(flat[0])
        self.events.append(f"gather {value:g}")

        def finish() -> None:
            self.events.append(f"wait {value:g}")
            flat.view(2, -1)[1].fill_(value)

        return Pending(finish)

    def reduce_scatter(self, flat: Tensor, out: Tensor, **_: Any) -> Pending:
        sum_in_order([flat], out)
        return DONE

    def exchange(self, numbers: Tensor) -> Tensor:
        return numbers.unsqueeze(0)


def gathered_units(count: int) -> tuple[GatheredWeights, Recorder, list[nn.Linear]]:
    """Return `count` units, each a layer whose weights are all its number."""
    recorder, layers, units = Recorder(), [], {}
    for number in range(count):
        layer = nn.Linear(40, 60, bias=False)
        bucket = Bucket(str(number), list(layer.named_parameters()), 2)
        bucket.release(torch.float32)
        shard = torch.full((bucket.plan.shard_numel,), float(number))
        units[str(number)] = [ShardedBucket(bucket, shard, recorder)]
        layers.append(layer)
    return GatheredWeights(units), recorder, layers


def test_a_unit_is_gathered_while_the_one_before_it_is_in_use() -> None:
    gathered, recorder, layers = gathered_units(4)
    gathered.prepare_forward()
    for number in range(4):
        gathered.use(str(number))
        assert layers[number].weight.eq(number).all()
        recorder.events.append(f"use {number}")
    for number in (3, 2, 1):
        gathered.before_backward(str(number))
        assert layers[number].weight.eq(number).all()
        recorder.events.append(f"back {number}")
    forward = "gather 0, wait 0, gather 1, use 0, wait 1, gather 2, use 1, wait 2, gather 3, use 2, wait 3, use 3"
    backward = "back 3, gather 1, back 2, wait 1, back 1"  # 3 and 2 are still there; nothing reads 0 again
    assert ", ".join(recorder.events) == f"{forward}, {backward}"


def test_a_list_of_uses_decides_what_is_gathered_ahead() -> None:
    """Two passes of a pipeline over two stages of a rank: no unit is gathered that is not used."""
    gathered, recorder, layers = gathered_units(4)
    order = ["0", "1", "2", "3", "3", "2", "1", "0", "0", "1"]
    gathered.follow(["table without shards", *order])
    for name in order:
        gathered.use(name)
        assert layers[int(name)].weight.eq(int(name)).all()
        gathered.use(name)  # backward computes the unit again
    gathered.use("table without shards")
    gathers = [event.split()[1] for event in recorder.events if event.startswith("gather")]
    assert gathers == ["0", "1", "2", "3", "1", "0"], "two buffers hold the units where the order turns"
    gathered.discard()
    assert all(layer.weight.isnan().all() for layer in layers)


@pytest.mark.parametrize(
    ("name", "stages_per_rank"),
    [("GPipe", 1), ("OneFOneB", 1), ("Interleaved", 2), ("ZeroBubble", 1), ("ZeroBubble", 2)],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_schedule_gathers_what_its_passes_read_and_nothing_else(
    name: ScheduleName, stages_per_rank: int, rank: int
) -> None:
    """Eight layers on two ranks, three micro-batches. The count of uses is that of the plan's traffic."""
    shape = Shape(ranks=2, stages_per_rank=stages_per_rank, micro_batches=3)
    model, cut = replace(DEEP, num_layers=8), 8 // shape.stages
    stages = {
        number: Stage(
            number,
            Decoder(model, Ops(), layers=range(number * cut, (number + 1) * cut), device="meta"),
            lambda _unit: None,
            NoSink(),
            recompute=False,
        )
        for number in shape.stages_of(rank)
    }
    uses = [
        unit
        for action in compute_order(name, shape)[rank]
        for unit in stages[action.stage].units(action.kind, trains=True)
    ]
    units = ["embedding", *(f"blocks.{layer}" for layer in range(8)), "head"]
    held = [unit for unit in units if unit in uses]
    assert len(uses) == 3 * (2 * 4 + 1), "each block forward and backward, and the table of the rank's end"
    gathered, recorder, layers = gathered_units(len(held))
    gathered.prepare_forward()
    gathered.follow(str(held.index(unit)) for unit in uses)
    for unit in uses:
        gathered.use(str(held.index(unit)))
        assert layers[held.index(unit)].weight.eq(held.index(unit)).all()
    gathers, waits = ([event for event in recorder.events if event.startswith(kind)] for kind in ("gather", "wait"))
    assert [event.split()[1] for event in gathers] == [event.split()[1] for event in waits], "each one is used"
    assert len(gathers) <= len(uses)


class NoSink:
    """For stages of which no pass is run."""

    def hold(self, keep: Callable[[Callable[[], None]], None]) -> AbstractContextManager[None]:
        raise AssertionError(keep)

    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        raise AssertionError(parameter, gradient)

    def end_micro_batch(self, stage: int, *, late: bool | None = None) -> None:
        raise AssertionError(stage, late)


def test_a_released_weight_has_its_shape_and_no_value() -> None:
    gathered, _, layers = gathered_units(3)
    for number in range(3):
        gathered.use(str(number))
    assert layers[0].weight.shape == (60, 40)
    assert layers[0].weight.isnan().all()
    gathered.discard()
    assert all(layer.weight.isnan().all() for layer in layers)


def test_backward_gets_a_weight_that_was_released_again() -> None:
    gathered, _, layers = gathered_units(4)
    gathered.use("0")
    restore = gathered.restore_of(layers[0].weight.t()[3:5])
    assert restore is not None
    for number in range(1, 4):
        gathered.use(str(number))
    again = restore()
    assert again.shape == (2, 60)
    assert again.eq(0).all()
    assert gathered.restore_of(torch.ones(3)) is None


def test_two_buffers_serve_all_units() -> None:
    gathered, _, layers = gathered_units(5)
    addresses = set()
    for _ in range(2):
        for number in range(5):
            gathered.use(str(number))
            addresses.add(layers[number].weight.data_ptr())
        gathered.discard()
    assert len(addresses) == BUFFERS
