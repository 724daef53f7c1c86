"""Schedules of pipeline stages: no deadlock, every pass once, and the bubble and memory that the papers give."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.pod.pipeline.actions import (
    SEVERAL_STAGES,
    WEIGHT_GRADIENT,
    Action,
    Kind,
    Orders,
    ScheduleName,
    Shape,
)
from stoker.pod.pipeline.formulas import bubble, live_activations
from stoker.pod.pipeline.schedules import SCHEDULES, forward_schedule, make_schedule
from stoker.pod.pipeline.simulation import Costs, ScheduleError, simulate

NAMES: tuple[ScheduleName, ...] = ("GPipe", "OneFOneB", "Interleaved", "ZeroBubble")


@st.composite
def cases(draw: st.DrawFn) -> tuple[ScheduleName, Shape]:
    name = draw(st.sampled_from(NAMES))
    stages_per_rank = draw(st.integers(1, 4)) if name in SEVERAL_STAGES else 1
    sizes = {"ranks": draw(st.integers(1, 8)), "micro_batches": draw(st.integers(1, 24))}
    return name, Shape(stages_per_rank=stages_per_rank, **sizes)


@st.composite
def uneven_costs(draw: st.DrawFn, stages: int) -> Costs:
    def times() -> list[float]:
        return draw(st.lists(st.floats(0.1, 10), min_size=stages, max_size=stages))

    return Costs(forward=times(), backward_input=times(), backward_weight=times(), transfer=draw(st.floats(0, 3)))


@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data())
def test_every_schedule_runs_whatever_its_stages_cost(case: tuple[ScheduleName, Shape], data: st.DataObject) -> None:
    name, shape = case
    costs = data.draw(uneven_costs(shape.stages))
    orders = make_schedule(name, shape)
    timeline = simulate(orders, shape, costs)  # raises for deadlocks, missing or repeated actions, crossed messages
    work = sum(costs.of(action) for order in orders for action in order)
    assert sum(timeline.busy) == pytest.approx(work)
    assert timeline.makespan >= max(timeline.busy) - 1e-9
    assert all(timeline.peak_live[rank] <= live_activations(name, shape, rank) for rank in range(shape.ranks))
    assert_ordered(orders)


def assert_ordered(orders: Orders) -> None:
    """Assert that each stage adds its gradients in the order of the micro-batches, and reduces after the last one."""
    for order in orders:
        for stage in {action.stage for action in order}:
            own = [action for action in order if action.stage == stage]
            added = [action.micro_batch for action in own if action.kind in WEIGHT_GRADIENT]
            assert added == sorted(added)
            assert own[-1].kind is Kind.REDUCE
            assert own[-2].kind in WEIGHT_GRADIENT or own[-2].kind is Kind.SEND_GRADIENT


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    ranks=st.integers(1, 8),
    stages_per_rank=st.integers(1, 4),
    groups=st.integers(1, 3),
    input_share=st.floats(1.0, 2.0),
)
def test_the_bubble_of_even_stages_is_that_of_the_papers(
    name: ScheduleName, ranks: int, stages_per_rank: int, groups: int, input_share: float
) -> None:
    v = stages_per_rank if name in SEVERAL_STAGES else 1
    groups = max(groups, 2) if name == "ZeroBubble" else groups  # its formula needs v m >= 2 p - 1
    shape = Shape(ranks=ranks, stages_per_rank=v, micro_batches=groups * ranks)
    costs = Costs(backward_input=input_share) if name != "ZeroBubble" else Costs()
    timeline = simulate(make_schedule(name, shape), shape, costs)
    assert timeline.bubble == pytest.approx(bubble(name, shape, costs))
    m, p = shape.micro_batches, shape.ranks
    unit = (p - 1) / (3 * v * m + p - 1) if name == "ZeroBubble" else (p - 1) / (v * m + p - 1)
    assert timeline.bubble == pytest.approx(unit)


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "percent", "live"),
    [
        ("GPipe", 1, 15.8, (16, 16, 16, 16)),
        ("OneFOneB", 1, 15.8, (4, 3, 2, 1)),
        ("Interleaved", 2, 8.6, (11, 9, 7, 5)),
        ("ZeroBubble", 1, 5.9, (4, 4, 4, 4)),
        ("ZeroBubble", 2, 3.0, (8, 8, 8, 8)),
    ],
)
def test_figures_of_four_ranks_and_sixteen_micro_batches(
    name: ScheduleName, stages_per_rank: int, percent: float, live: tuple[int, ...]
) -> None:
    shape = Shape(ranks=4, stages_per_rank=stages_per_rank, micro_batches=16)
    timeline = simulate(make_schedule(name, shape), shape)
    assert round(100 * timeline.bubble, 1) == percent
    assert timeline.peak_live == live


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 8), micro_batches=st.integers(1, 24), for_input=st.floats(0.8, 1.5))
def test_zero_bubble_waits_no_longer_than_1f1b_with_its_largest_memory(
    ranks: int, micro_batches: int, for_input: float
) -> None:
    shape = Shape(ranks=ranks, micro_batches=micro_batches)
    costs = Costs(backward_input=for_input)
    split, whole = (simulate(make_schedule(name, shape), shape, costs) for name in ("ZeroBubble", "OneFOneB"))
    assert split.bubble < whole.bubble
    assert max(split.peak_live) <= max(whole.peak_live)


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(1, 8), stages_per_rank=st.integers(1, 4), micro_batches=st.integers(1, 24))
def test_validation_runs_forward_passes_alone(ranks: int, stages_per_rank: int, micro_batches: int) -> None:
    shape = Shape(ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)
    timeline = simulate(forward_schedule(shape), shape)
    assert {span.action.kind for span in timeline.spans} <= {
        Kind.FORWARD,
        Kind.SEND_ACTIVATION,
        Kind.RECEIVE_ACTIVATION,
    }
    if micro_batches % ranks == 0:
        assert timeline.makespan == stages_per_rank * micro_batches + ranks - 1


SHAPE = Shape(ranks=2, micro_batches=2)


def swapped(orders: Orders, rank: int, first: Kind, second: Kind) -> Orders:
    """Return the schedule with the first actions of two kinds of one rank exchanged."""
    changed = [list(order) for order in orders]
    order = changed[rank]
    one, other = (next(i for i, action in enumerate(order) if action.kind is kind) for kind in (first, second))
    order[one], order[other] = order[other], order[one]
    return changed


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        pytest.param([order[1:] for order in make_schedule("GPipe", SHAPE)], "is missing", id="an action is missing"),
        pytest.param(
            [[*order, order[0]] for order in make_schedule("GPipe", SHAPE)], "2 times", id="an action is there twice"
        ),
        pytest.param(
            list(reversed(make_schedule("GPipe", SHAPE))), "belongs to rank", id="a stage runs on another rank"
        ),
        pytest.param(
            swapped(make_schedule("OneFOneB", SHAPE), 1, Kind.FORWARD, Kind.BACKWARD),
            r"deadlock: rank 0 at backward of stage 0, micro-batch 0; rank 1 at backward of stage 1, micro-batch 0",
            id="backward before forward",
        ),
    ],
)
def test_simulation_refuses_a_wrong_schedule(orders: Orders, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        simulate(orders, SHAPE)


def test_simulation_refuses_a_receive_that_is_posted_after_its_use() -> None:
    shape = Shape(ranks=2)
    late = swapped(make_schedule("GPipe", shape), 1, Kind.RECEIVE_ACTIVATION, Kind.FORWARD)
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 at .*; rank 1 at forward of stage 1, micro-batch 0"):
        simulate(late, shape)


def test_simulation_refuses_messages_in_another_order() -> None:
    orders = [list(order) for order in make_schedule("GPipe", SHAPE)]
    one, other = (Action(Kind.RECEIVE_ACTIVATION, 1, micro_batch) for micro_batch in (0, 1))
    places = [orders[1].index(one), orders[1].index(other)]
    orders[1][places[0]], orders[1][places[1]] = other, one
    with pytest.raises(ScheduleError, match=r"rank 0 sends \(stage, micro-batch\) \(1, 0\) where rank 1 receives"):
        simulate(orders, SHAPE)


@pytest.mark.parametrize("name", ["GPipe", "OneFOneB"])
def test_schedules_of_one_stage_per_rank_refuse_more(name: ScheduleName) -> None:
    with pytest.raises(ValueError, match=f"stagesPerRank 2 does not fit pipelineSchedule {name}.*Interleaved"):
        make_schedule(name, Shape(ranks=2, stages_per_rank=2))


def test_unknown_schedules_and_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=f"'Looped' is unknown; allowed: {', '.join(SCHEDULES)}"):
        make_schedule("Looped", Shape(ranks=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="micro_batches must be at least 1, got 0"):
        Shape(ranks=2, micro_batches=0)
