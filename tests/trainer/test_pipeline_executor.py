"""The executor of pipeline schedules: each gives the gradients and losses of one pass over the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker.model.attend import PackedAttend
from stoker.model.config import ModelConfig
from stoker.model.decoder import Decoder
from stoker.model.kernels.ops import Ops
from stoker.model.kernels.weight_queue import WeightQueue, set_weight_queue
from stoker.pod.pipeline.actions import ScheduleName, Shape
from stoker.pod.pipeline.schedules import forward_schedule, make_schedule
from stoker.pod.pipeline.simulation import simulate
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.mesh import AxisGroups
from stoker.trainer.rank.pipeline.executor import Executor, Wire
from stoker.trainer.rank.pipeline.link import NO_LINKS, HostLink, Link, Links, open_links
from stoker.trainer.rank.pipeline.slices import stage_layers
from stoker.trainer.rank.pipeline.stage import Stage, StageInputs
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import TINY, SyntheticBatches, tiny_config

MODEL = replace(TINY, num_layers=6, tie_embeddings=False)
MICRO_BATCHES = 5
CPU = torch.device("cpu")
Gradients = dict[str, Tensor]


class PlainSink:
    """Leaves gradients where autograd puts them."""

    def __init__(self) -> None:
        self.closed: list[tuple[int, bool | None]] = []

    @contextmanager
    def hold(self, keep: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        yield

    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        parameter.backward(gradient)

    def end_micro_batch(self, stage: int, *, late: bool | None = None) -> None:
        self.closed.append((stage, late))


def make_inputs(ops: Ops, count: int = MICRO_BATCHES) -> list[StageInputs]:
    batches = SyntheticBatches(tiny_config())
    return [stage_inputs(batches.micro_batch(index), ops) for index in range(count)]


def stage_inputs(batch: MicroBatch, ops: Ops) -> StageInputs:
    return StageInputs(
        tokens_T=torch.from_numpy(batch.tokens_T),
        positions_T=torch.from_numpy(batch.positions_T),
        targets_T=torch.from_numpy(batch.targets_T),
        weights_T=torch.from_numpy(batch.weights_T),
        attend=PackedAttend(ops, "sdpa", torch.from_numpy(batch.cu_seqlens), batch.max_seqlen),
        rows=len(batch.tokens_T),
    )


def make_stages(shape: Shape, rank: int, model: ModelConfig, *, recompute: bool, split: bool) -> list[Stage]:
    layers = stage_layers(model, shape.stages, 24)
    return [make_stage(number, layers[number], model, recompute, split) for number in shape.stages_of(rank)]


def make_stage(number: int, layers: range, model: ModelConfig, recompute: bool, split: bool) -> Stage:
    decoder = Decoder(model, Ops(), layers=layers)
    decoder.init_weights(0)
    queue = WeightQueue() if split else None
    for parameter in decoder.parameters() if queue else ():
        set_weight_queue(parameter, queue)  # type: ignore[arg-type]
    return Stage(number, decoder, lambda _unit: None, PlainSink(), recompute=recompute, queue=queue)


def gradients(decoders: Sequence[Decoder]) -> Gradients:
    found: Gradients = {}
    for decoder in decoders:
        for part in decoder.named_parts():
            assert part.parameter.grad is not None, part.hf_name
            rows = part.parameter.grad[part.row_start : part.row_end]
            found[part.hf_name + (" (copy)" if part.is_copy else "")] = rows
    return found


def whole_model(model: ModelConfig) -> tuple[list[float], Gradients]:
    """Return losses and summed gradients of one pass over all micro-batches, one after the other."""
    decoder = Decoder(model, Ops())
    decoder.init_weights(0)
    losses = []
    for inputs in make_inputs(decoder.ops):
        hidden = decoder(inputs.tokens_T, inputs.positions_T, inputs.attend)
        loss = decoder.cross_entropy(hidden, inputs.targets_T, inputs.weights_T).loss_sum
        loss.backward()
        losses.append(loss.item())
    return losses, gradients([decoder])


def run(
    links: Links,
    rank: int,
    shape: Shape,
    name: ScheduleName,
    model: ModelConfig,
    recompute: bool,
    first_links: Links | None = None,
) -> tuple[list[float], list[float], Gradients, dict[str, int]]:
    """Run a step and a validation, the latter twice; return the losses, the gradients, and what is left in memory."""
    stages = make_stages(shape, rank, model, recompute=recompute, split=name == "ZeroBubble")
    reduced: list[int] = []
    wire = Wire(hidden_size=model.hidden_size, dtype=torch.float32, device=CPU)
    executor = Executor(stages, links, wire, reduced.append, first_links)
    orders = make_schedule(name, shape)
    inputs = make_inputs(Ops(), shape.micro_batches)
    losses = executor.train(orders[rank], inputs)
    assert sorted(reduced) == list(shape.stages_of(rank))
    made = executor.buffers.count
    evaluated = executor.evaluate(forward_schedule(shape)[rank], inputs)
    again = executor.evaluate(forward_schedule(shape)[rank], inputs)
    assert {place: float(loss) for place, loss in again.items()} == {
        place: float(loss) for place, loss in evaluated.items()
    }
    facts = {
        "in flight": sum(stage.num_in_flight for stage in stages),
        "buffers": made,
        "peak": simulate(orders, shape).peak_live[rank],
    }
    found = gradients([stage.decoder for stage in stages])
    return *(([float(one[key]) for key in sorted(one)]) for one in (losses, evaluated)), found, facts  # type: ignore[return-value]


@pytest.fixture(scope="module")
def expected() -> Callable[[ModelConfig], tuple[list[float], Gradients]]:
    found: dict[ModelConfig, tuple[list[float], Gradients]] = {}

    def of(model: ModelConfig) -> tuple[list[float], Gradients]:
        if model not in found:
            found[model] = whole_model(model)
        return found[model]

    return of


def assert_equal_to_the_whole(answers: Sequence[Any], whole: tuple[list[float], Gradients]) -> None:
    losses, every = whole
    last = answers[-1]
    assert last[0] == pytest.approx(losses, rel=1e-6)
    assert last[1] == pytest.approx(losses, rel=1e-6)
    found = {name: gradient for answer in answers for name, gradient in answer[2].items()}
    copies = {name: found.pop(name) for name in list(found) if name.endswith("(copy)")}
    for name, gradient in copies.items():
        found[name.removesuffix(" (copy)")] = found[name.removesuffix(" (copy)")] + gradient
    assert found.keys() == every.keys()
    for name, gradient in every.items():
        difference = float((found[name] - gradient).norm() / gradient.norm())
        assert difference <= 1e-6, (name, difference)
    for answer in answers:
        assert answer[3]["in flight"] == 0
        assert answer[3]["buffers"] <= 2 * answer[3]["peak"] + 2


SCHEDULES: list[tuple[ScheduleName, int]] = [
    ("GPipe", 1),
    ("OneFOneB", 1),
    ("Interleaved", 2),
    ("Interleaved", 3),
    ("ZeroBubble", 1),
    ("ZeroBubble", 2),
]


@pytest.mark.parametrize(("name", "stages_per_rank"), SCHEDULES)
def test_one_rank_with_all_stages_equals_the_whole_model(
    name: ScheduleName, stages_per_rank: int, expected: Callable[[ModelConfig], tuple[list[float], Gradients]]
) -> None:
    shape = Shape(ranks=1, stages_per_rank=stages_per_rank, micro_batches=MICRO_BATCHES)
    assert_equal_to_the_whole([run(NO_LINKS, 0, shape, name, MODEL, False)], expected(MODEL))


World = dict[tuple[int, bool, bool], Links]
"""By ranks, whether they are a ring, and whether their channels go through the host."""


def open_all(rank: int, _size: int) -> tuple[int, World]:
    """Return the links of pipelines of two and of three ranks, in a line and in a ring."""
    pipelines: dict[int, list[tuple[int, ...]]] = {2: [(0, 1)], 3: [(0, 1, 2)]}
    groups = AxisGroups(CPU)
    made = {
        (size, is_ring, by_host): open_links(ranks, open_group, is_ring=is_ring, channel=channel)
        for size, ranks in pipelines.items()
        for is_ring in (False, True)
        for by_host, open_group, channel in (
            (False, groups.process_group, Link),
            (True, groups.host_group, HostLink),
        )
    }
    return rank, made


def run_rank(held: tuple[int, World], shape: Shape, name: ScheduleName, model: ModelConfig, recompute: bool) -> Any:
    """Run one rank; the first messages of three ranks go through the host."""
    rank, links = held
    if rank >= shape.ranks:
        return None
    own, first = (links[shape.ranks, shape.stages_per_rank > 1, by_host] for by_host in (False, True))
    return run(own, rank, shape, name, model, recompute, first_links=first if shape.ranks == 3 else None)


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(3, open_all) as made:
        yield made


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("name", "stages_per_rank"), [case for case in SCHEDULES if case != ("Interleaved", 3)])
def test_several_ranks_equal_the_whole_model(
    world: RankWorld,
    ranks: int,
    name: ScheduleName,
    stages_per_rank: int,
    expected: Callable[[ModelConfig], tuple[list[float], Gradients]],
) -> None:
    shape = Shape(ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=MICRO_BATCHES)
    answers = world.call(run_rank, shape, name, MODEL, False)[:ranks]
    assert_equal_to_the_whole(answers, expected(MODEL))


@pytest.mark.parametrize(("name", "stages_per_rank"), [("OneFOneB", 1), ("ZeroBubble", 2)])
@pytest.mark.parametrize(
    ("changes", "recompute"), [({"tie_embeddings": True}, False), ({}, True)], ids=["tied", "recompute"]
)
def test_tied_tables_and_recompute(
    world: RankWorld,
    name: ScheduleName,
    stages_per_rank: int,
    changes: dict[str, Any],
    recompute: bool,
    expected: Callable[[ModelConfig], tuple[list[float], Gradients]],
) -> None:
    model = replace(MODEL, **changes)
    shape = Shape(ranks=2, stages_per_rank=stages_per_rank, micro_batches=MICRO_BATCHES)
    answers = world.call(run_rank, shape, name, model, recompute)[:2]
    assert_equal_to_the_whole(answers, expected(model))
