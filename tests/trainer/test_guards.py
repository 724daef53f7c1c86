"""The guards of a run: checksums of what ranks hold alike, and loss spikes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.pod.causes import Cause
from stoker.trainer.errors import LossSpiked, NonFinite, StateDiverged, StorageFailed
from stoker.trainer.protocol.config import GuardsConfig, TrainerConfig
from stoker.trainer.protocol.messages import SourceProgress, StepEvent, StopCommand
from stoker.trainer.protocol.parallel_dims import ParallelDims
from stoker.trainer.rank.build import RankContext
from stoker.trainer.rank.checksum import check_replicas, checksum, find_mismatches, holders
from stoker.trainer.rank.data.batch import MicroBatch
from stoker.trainer.rank.guards import MAX_REWINDS, Guards
from stoker.trainer.rank.loss_spike import NEW_LEVEL, WARM_UP, WINDOW, LossHistory
from stoker.trainer.rank.main import cause_of
from stoker.trainer.rank.skipped_batches import MAX_BYTES, batch_of_step, list_file, read_skipped, write_skipped
from stoker.trainer.rank.zero_maker import make_zero
from testing.trainer.rank_world import RankWorld
from testing.trainer.tiny_run import (
    TINY,
    SyntheticBatches,
    alone,
    context_of,
    data_parallel,
    empty_decoder,
    tiny_config,
    train,
)

SPIKE_STEP = WARM_UP + 3
"""Counted from 1."""


@given(st.lists(st.integers(0, 255), min_size=2, max_size=60), st.integers(0, 59), st.integers(0, 7))
def test_a_checksum_depends_on_every_bit_and_place(values: list[int], place: int, bit: int) -> None:
    held = torch.tensor(values, dtype=torch.uint8)
    changed = held.clone()
    changed[place % len(values)] ^= 1 << bit
    assert checksum(held) != checksum(changed)
    swapped = held.clone()
    swapped[[0, 1]] = held[[1, 0]]
    assert (checksum(held) == checksum(swapped)) == bool(held[0] == held[1])


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ([5, 5, 5, 5], []),
        ([5, 5, 7, 5], ["the dense weights of rank 2 differ from those of ranks 0, 1, 3"]),
        ([5, 7, 5, 6], ["the dense weights of ranks 0, 1, 2, 3 differ, and no majority of them agrees"]),
    ],
)
def test_the_ranks_in_the_minority_are_named(sums: list[int], expected: list[str]) -> None:
    groups = holders(ParallelDims(shard=4), 1)
    assert find_mismatches([[value, 1, 1] for value in sums], groups) == expected


def test_shards_of_stage_3_are_compared_over_replicas_alone() -> None:
    dims = ParallelDims(replicate=2, shard=2)
    assert holders(dims, 3)["dense"] == [(0, 2), (1, 3)]
    assert holders(dims, 2)["dense"] == [(0, 1, 2, 3)]


def contexts(_rank: int, _size: int) -> dict[int, RankContext | None]:
    return {2: context_of(data_parallel(2)), 3: context_of(data_parallel(3))}


def damage(held: dict[int, RankContext | None], size: int, stage: int, rank: int | None) -> str | None:
    """Return the error of the comparison after one bit of a rank's weights was flipped."""
    context = held[size]
    if context is None:
        return None
    config = tiny_config(memory__zero_stage=stage, training__deterministic="Off")
    decoder, start = empty_decoder(config, context.device, TINY)
    zero = make_zero(config, decoder, context.mesh, context.device, start.fill)
    if context.mesh.rank == rank:
        zero.states[1].bucket.flat.view(torch.int32)[77] ^= 1 << 3
    try:
        check_replicas(zero, 4)
    except StateDiverged as error:
        return str(error)
    finally:
        zero.close()
    return ""


@pytest.fixture(scope="module")
def world() -> Iterator[RankWorld]:
    with RankWorld(3, contexts) as made:
        yield made


@pytest.mark.parametrize("stage", [0, 1])
def test_one_flipped_bit_names_its_rank(world: RankWorld, stage: int) -> None:
    found = world.call(damage, 3, stage, 1)
    assert found == ["step 4: the dense weights of rank 1 differ from those of ranks 0, 2"] * 3


def test_equal_ranks_pass(world: RankWorld) -> None:
    assert world.call(damage, 3, 1, None) == [""] * 3
    assert world.call(damage, 2, 0, None) == ["", "", None]


def history(losses: list[float]) -> LossHistory:
    made = LossHistory()
    for loss in losses:
        made.add(loss)
    return made


def test_a_spike_lies_far_above_the_last_losses() -> None:
    steady = [2.0 + 0.01 * (index % 5) for index in range(WARM_UP)]
    assert history(steady[:-1]).limit == math.inf
    guard = history(steady)
    assert 2.2 < guard.limit < 2.3
    assert not guard.add(2.2)
    limit = guard.limit
    assert guard.add(3.0)
    assert guard.limit == limit  # a spike is no part of the history


def test_many_spikes_in_a_row_are_a_new_level() -> None:
    guard = history([2.0] * WARM_UP)
    assert [guard.add(5.0) for _ in range(NEW_LEVEL)] == [True] * NEW_LEVEL
    assert guard.limit == math.inf
    assert not any(guard.add(5.0) for _ in range(WINDOW))


@given(st.lists(st.floats(0, 20), max_size=200), st.integers(0, 199))
def test_a_history_goes_on_from_its_state(losses: list[float], cut: int) -> None:
    whole, first = LossHistory(), LossHistory()
    expected = [whole.add(loss) for loss in losses]
    found = [first.add(loss) for loss in losses[:cut]]
    second = LossHistory()
    second.restore(json.loads(json.dumps(first.state())))
    assert found + [second.add(loss) for loss in losses[cut:]] == expected


@given(st.sets(st.integers(0, 40)))
def test_steps_train_the_batches_that_are_not_left_out(skipped: set[int]) -> None:
    expected = [batch for batch in range(100) if batch not in skipped][:50]
    assert [batch_of_step(step, skipped) for step in range(50)] == expected


def attempts(losses: list[float], every: int) -> tuple[list[int], list[int], list[int]]:
    """Return the batches that a run with `Rewind` has trained, left out and accepted, by the loss of each batch.

    Each attempt goes on from the last save, of which there is one after every `every` steps.
    """
    trained: list[int] = []
    left_out: list[int] = []
    accepted: list[int] = []
    step, saved = 0, (0, Guards(GuardsConfig(loss_spike="Rewind")).state())
    guards = Guards(GuardsConfig(loss_spike="Rewind"))
    while (batch := guards.batch_of_step(step)) < len(losses):
        limit = guards.loss_limit(batch)
        spike = guards.judge(step + 1, batch, losses[batch], (batch, batch + 1))
        rewinds = spike is not None and spike["action"] == "Rewind"
        assert rewinds == (losses[batch] > limit)  # an update is applied where no step is taken back
        if rewinds:
            guards.leave_out(batch)
            left_out.append(batch)
            step, state = saved
            guards = Guards(GuardsConfig(loss_spike="Rewind"), left_out)
            guards.restore(state)
            del trained[step:]
            continue
        accepted += [batch] * (spike is not None)
        trained.append(batch)
        step += 1
        saved = (step, guards.state()) if step % every == 0 else saved
    return trained, left_out, sorted(set(accepted))


@given(st.integers(WARM_UP, 2 * WINDOW), st.floats(3, 50), st.integers(1, 2 * WINDOW))
def test_a_new_level_of_losses_is_accepted_after_some_rewinds(change: int, level: float, every: int) -> None:
    losses = [2.0] * change + [level] * WINDOW
    trained, left_out, accepted = attempts(losses, every)
    assert left_out == list(range(change, change + MAX_REWINDS))
    assert accepted == [change + MAX_REWINDS]
    assert trained == [batch for batch in range(len(losses)) if batch not in left_out]


@given(st.sets(st.integers(WARM_UP, WARM_UP + 60)), st.integers(1, WINDOW))
def test_spikes_that_are_fewer_in_a_row_are_all_left_out(places: set[int], every: int) -> None:
    spikes = {place for place in places if not all(place - back in places for back in range(1, MAX_REWINDS + 1))}
    losses = [20.0 if batch in spikes else 2.0 for batch in range(2 * WINDOW)]
    trained, left_out, accepted = attempts(losses, every)
    assert (sorted(left_out), accepted) == (sorted(spikes), [])
    assert trained == [batch for batch in range(len(losses)) if batch not in spikes]


@given(st.lists(st.floats(0, 50), max_size=100), st.integers(1, WINDOW))
def test_no_more_steps_in_a_row_are_taken_back_than_the_limit(losses: list[float], every: int) -> None:
    _, left_out, _ = attempts(losses, every)
    assert all(set(range(batch, batch + MAX_REWINDS + 1)) - set(left_out) for batch in left_out)


def test_a_spike_that_is_not_finite_is_never_a_new_level(tmp_path: Path) -> None:
    spikes = range(SPIKE_STEP - 1, SPIKE_STEP + MAX_REWINDS)
    config = spiky_config(tmp_path, "Rewind", training__total_steps=SPIKE_STEP)
    for batch in spikes:
        with pytest.raises(LossSpiked, match=f"loss .* leaves out batch {batch}$"):
            run(config, TOO_LARGE, spikes)
    assert curve(run(config, TOO_LARGE, spikes)) == curve(without(config, spikes))[-3:]


def test_a_run_goes_on_at_a_new_level_of_losses(tmp_path: Path) -> None:
    spikes, first = range(SPIKE_STEP - 1, SPIKE_STEP + 99), SPIKE_STEP - 1
    events = rewind(spiky_config(tmp_path, "Rewind"), spikes, MAX_REWINDS)
    assert [event.loss > 100 for event in events[-5:]] == [False] + [True] * 4
    assert events[-1].skipped_steps == 0
    (kept,) = newest(tmp_path)["lineage"]["loss_spikes"]
    assert (kept["step"], kept["action"], kept["samples"]) == (
        *(SPIKE_STEP, "Accept"),
        [first + MAX_REWINDS, first + MAX_REWINDS + 1],
    )
    assert newest(tmp_path)["lineage"]["skipped_batches"] == list(range(first, first + MAX_REWINDS))


def test_the_list_of_batches_survives_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    file = list_file(tmp_path / "root", "job")
    assert read_skipped(file) == ()
    write_skipped(file, [9, 4, 9])
    assert read_skipped(file) == (4, 9)
    for text in ('{"batches": [1, "2"]}', '{"batches": [-1]}', "[]", "{", " " * (MAX_BYTES + 1)):
        file.write_text(text)
        with pytest.raises(StorageFailed, match=rf"{file.name}: not a list of batches") as caught:
            read_skipped(file)
        assert cause_of(caught.value) is Cause.STORAGE_ERROR  # CheckpointCorrupt would condemn every good save


def test_a_list_of_batches_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    file = list_file(tmp_path, "job")
    file.mkdir()
    with pytest.raises(OSError, match=file.name):
        write_skipped(file, [4])
    assert list(tmp_path.iterdir()) == [file]


TOO_LARGE = 1e37
"""A factor with which the losses of a batch add up to infinity, and their weights do not."""


class Spiky(SyntheticBatches):
    """Batches of which some count `factor` times as much; a stop arrives with the first of them."""

    def __init__(
        self,
        config: TrainerConfig,
        factor: float,
        spikes: Collection[int] = (SPIKE_STEP - 1,),
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self._factor = factor
        self._spikes = spikes
        self._stop = stop

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        factor = self._factor if step in self._spikes else 1
        if step in self._spikes:
            self._stop()
        for batch in super().micro_batches(step, dp_rank, dp_size):
            yield replace(batch, weights_T=batch.weights_T * factor)

    def target_tokens(self, step: int) -> int:
        return sum(int(batch.weights_T.sum()) for batch in super().micro_batches(step, 0, 1))


def spiky_config(folder: Path, mode: str, **changes: Any) -> TrainerConfig:
    fields: dict[str, Any] = {
        "training__total_steps": SPIKE_STEP + 3,
        "training__global_batch_size": 1,
        "optimization__learning_rate": 1e-4,
        "optimization__schedule": "constant",
        "guards__loss_spike": mode,
        "checkpoint__interval_steps": 5,
        "checkpoint__max_to_keep": 9,
        "logging__jsonl": str(folder / "log.jsonl"),
    }
    return tiny_config(folder, **fields | changes)


def run(config: TrainerConfig, factor: float = 100, spikes: Collection[int] = (SPIKE_STEP - 1,)) -> list[StepEvent]:
    context = alone()
    train(config, context, batches=Spiky(config, factor, spikes))
    found: list[StepEvent] = context.channel.all(StepEvent)  # type: ignore[attr-defined]
    return found


def newest(folder: Path) -> Mapping[str, Any]:
    found = CheckpointRoot(folder / "root").committed()
    return CheckpointReader(max(found, key=lambda item: item.path.name).path).manifest.meta


def logged(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "loss_spike"]


@pytest.mark.parametrize("mode", ["Off", "Record", "Skip"])
def test_without_rewind_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path, mode: str) -> None:
    with pytest.raises(NonFinite, match=rf"step {SPIKE_STEP}: loss"):
        run(spiky_config(tmp_path, mode), TOO_LARGE)


@pytest.mark.parametrize(("mode", "skipped"), [("Record", 0), ("Skip", 1)])
def test_a_spike_is_recorded_in_log_and_lineage_and_skipped_on_request(tmp_path: Path, mode: str, skipped: int) -> None:
    events = run(spiky_config(tmp_path, mode))
    assert events[-1].skipped_steps == skipped
    (spike,) = logged(tmp_path)
    assert (spike["step"], spike["action"], spike["samples"]) == (SPIKE_STEP, mode, [SPIKE_STEP - 1, SPIKE_STEP])
    assert spike["loss"] > spike["limit"] > 0
    (kept,) = newest(tmp_path)["lineage"]["loss_spikes"]
    assert kept == {key: value for key, value in spike.items() if key != "kind"}


@pytest.mark.parametrize(("factor", "has_number"), [(100, True), (TOO_LARGE, False)], ids=["spike", "not finite"])
def test_a_run_that_rewinds_goes_on_without_the_batch(tmp_path: Path, factor: float, has_number: bool) -> None:
    config = spiky_config(tmp_path, "Rewind")
    with pytest.raises(LossSpiked, match=rf"step {SPIKE_STEP}: loss .* leaves out batch {SPIKE_STEP - 1}"):
        run(config, factor)
    (spike,) = logged(tmp_path)
    assert (spike["samples"], "loss" in spike) == ([SPIKE_STEP - 1, SPIKE_STEP], has_number)
    events = run(config, factor)
    assert [event.step for event in events] == list(range(SPIKE_STEP // 5 * 5 + 1, SPIKE_STEP + 4))
    assert max(event.loss for event in events) < 20
    assert newest(tmp_path)["lineage"]["skipped_batches"] == [SPIKE_STEP - 1]
    assert curve(events) == curve(without(config, {SPIKE_STEP - 1}))[-len(events) :]


class Without(SyntheticBatches):
    """The corpus of a run that never had some batches."""

    def __init__(self, config: TrainerConfig, left_out: Collection[int]) -> None:
        super().__init__(config)
        self._left_out = left_out

    def micro_batches(self, step: int, dp_rank: int, dp_size: int) -> Iterator[MicroBatch]:
        return super().micro_batches(batch_of_step(step, self._left_out), dp_rank, dp_size)


def without(config: TrainerConfig, left_out: Collection[int]) -> list[StepEvent]:
    """The whole of an unguarded run whose corpus lacks some batches."""
    context, fields = alone(), config.model_dump()
    fields["checkpoint"]["root"], fields["guards"]["loss_spike"] = fields["checkpoint"]["root"] + "-without", "Off"
    other = TrainerConfig.model_validate(fields)
    train(other, context, batches=Without(other, left_out))
    found: list[StepEvent] = context.channel.all(StepEvent)  # type: ignore[attr-defined]
    return found


def curve(events: list[StepEvent]) -> list[tuple[int, float, float | None]]:
    return [(event.step, event.loss, event.loss_scale) for event in events]


def saved(folder: Path) -> list[int]:
    return sorted(found.step for found in CheckpointRoot(folder / "root").committed())


def stop(config: TrainerConfig, factor: float, command: StopCommand, *, spike: int = SPIKE_STEP - 1) -> Cause:
    """Run until a stop that arrives within the step of a spike."""
    context = alone()
    return train(config, context, batches=Spiky(config, factor, [spike], lambda: context.channel.put(command)))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("factor", [100, TOO_LARGE], ids=["spike", "not finite"])
def test_a_stop_in_the_step_of_a_spike_saves_the_state_before_it(tmp_path: Path, factor: float, precision: str) -> None:
    config = spiky_config(tmp_path, "Rewind", memory__precision=precision)
    assert stop(config, factor, StopCommand(mode="suspend")) is Cause.INTERRUPTED
    assert saved(tmp_path)[-1] == SPIKE_STEP - 1
    assert newest(tmp_path)["lineage"]["skipped_batches"] == [SPIKE_STEP - 1]
    (spike,) = newest(tmp_path)["lineage"]["loss_spikes"]
    assert spike["step"] == SPIKE_STEP
    events = run(config, factor)
    assert [event.step for event in events] == list(range(SPIKE_STEP, SPIKE_STEP + 4))
    assert curve(events) == curve(without(config, {SPIKE_STEP - 1}))[-len(events) :]


@pytest.mark.parametrize(("mode", "precision"), [("Off", "fp32"), ("Skip", "fp16")])
def test_a_stop_in_a_step_that_is_not_finite_saves_the_state_before_it(
    tmp_path: Path, mode: str, precision: str
) -> None:
    config = spiky_config(tmp_path, mode, memory__precision=precision)
    assert stop(config, TOO_LARGE, StopCommand(mode="suspend")) is Cause.INTERRUPTED
    assert saved(tmp_path)[-1] == SPIKE_STEP - 1
    assert newest(tmp_path)["lineage"]["skipped_batches"] == []
    with pytest.raises(NonFinite, match=rf"step {SPIKE_STEP}: loss"):
        run(config, TOO_LARGE)
    assert curve(run(config, 1)) == curve(without(config, ()))[SPIKE_STEP - 1 :]


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (StopCommand(mode="cancel"), Cause.CANCELLED),
        (StopCommand(mode="interrupt", save=False), Cause.INTERRUPTED),
    ],
    ids=["the step before is saved already", "without a save"],
)
def test_a_stop_in_the_step_of_a_spike_saves_no_step_twice(tmp_path: Path, command: StopCommand, cause: Cause) -> None:
    every = SPIKE_STEP - 1 if command.save else SPIKE_STEP - 2
    config = spiky_config(tmp_path, "Rewind", checkpoint__interval_steps=every)
    assert stop(config, 100, command) is cause
    assert saved(tmp_path) == [every]
    events = run(config)
    assert curve(events) == curve(without(config, {SPIKE_STEP - 1}))[every:]


def test_a_stop_in_a_first_step_that_is_taken_back_has_nothing_to_save(tmp_path: Path) -> None:
    config = spiky_config(tmp_path, "Rewind", training__total_steps=3)
    assert stop(config, TOO_LARGE, StopCommand(mode="interrupt"), spike=0) is Cause.INTERRUPTED
    assert not (tmp_path / "root").exists() or saved(tmp_path) == []
    assert curve(run(config, TOO_LARGE, [0])) == curve(without(config, {0}))


def stop_one_rank(held: dict[int, RankContext | None], folder: Path) -> tuple[str, list[int]] | None:
    """Return how a run of two ranks ended, of which one gets a stop in the step of a spike."""
    context = held[2]
    if context is None:
        return None
    config = spiky_config(folder, "Rewind", training__global_batch_size=2, training__deterministic="Off")

    def put() -> None:
        if context.mesh.rank == 1:
            context.channel.put(StopCommand(mode="interrupt"))

    cause = train(config, context, batches=Spiky(config, 100, [SPIKE_STEP - 1], put))
    return cause.value, saved(folder)


def test_a_stop_of_one_rank_in_the_step_of_a_spike_saves_on_all(world: RankWorld, tmp_path: Path) -> None:
    ended = ("Interrupted", [5, 10, 15, 20, SPIKE_STEP - 1])
    assert world.call(stop_one_rank, tmp_path) == [ended, ended, None]
    assert newest(tmp_path)["lineage"]["skipped_batches"] == [SPIKE_STEP - 1]


def rewind(config: TrainerConfig, spikes: Collection[int], times: int) -> list[StepEvent]:
    """Train until an attempt reaches the end; so many before it rewind."""
    for _ in range(times):
        with pytest.raises(LossSpiked):
            run(config, spikes=spikes)
    return run(config, spikes=spikes)


@pytest.mark.parametrize("every", [5, SPIKE_STEP - 1, SPIKE_STEP, SPIKE_STEP + 1], ids=lambda every: f"saves {every}")
@pytest.mark.parametrize(
    "spikes",
    [(SPIKE_STEP - 1,), (SPIKE_STEP - 1, SPIKE_STEP), (SPIKE_STEP - 1, SPIKE_STEP + 1), (SPIKE_STEP + 2,)],
    ids=["one", "two in a row", "two", "the last step"],
)
def test_each_rewind_leaves_out_one_batch(tmp_path: Path, spikes: tuple[int, ...], every: int) -> None:
    config = spiky_config(tmp_path, "Rewind", checkpoint__interval_steps=every)
    events = rewind(config, spikes, len(spikes))
    assert curve(events) == curve(without(config, spikes))[-len(events) :]
    assert newest(tmp_path)["lineage"]["skipped_batches"] == list(spikes)
    assert newest(tmp_path)["step"] == SPIKE_STEP + 3


@pytest.mark.parametrize(
    "spikes", [(SPIKE_STEP - 1, SPIKE_STEP), (SPIKE_STEP + 2,)], ids=["two in a row", "the last step"]
)
@pytest.mark.parametrize("ends", [SPIKE_STEP - 1, SPIKE_STEP], ids=["before", "behind"])
def test_a_run_that_skips_goes_on_from_a_save_beside_a_spike(
    tmp_path: Path, spikes: tuple[int, ...], ends: int
) -> None:
    whole = run(spiky_config(tmp_path / "whole", "Skip"), spikes=spikes)
    shorter = spiky_config(tmp_path, "Skip", training__total_steps=ends)
    run(shorter, spikes=spikes)
    config = spiky_config(tmp_path, "Skip")
    events = run(config, spikes=spikes)
    assert curve(events) == curve(whole)[ends:]
    assert newest(tmp_path)["skipped_steps"] == len(spikes)
    assert [spike["step"] for spike in newest(tmp_path)["lineage"]["loss_spikes"]] == [index + 1 for index in spikes]


def run_to_the_end(folder: Path) -> None:
    """Train a run that rewinds once."""
    config = spiky_config(folder, "Rewind")
    with pytest.raises(LossSpiked):
        run(config)
    run(config)


def test_the_progress_of_sources_is_told_without_the_batch(tmp_path: Path) -> None:
    config, told = spiky_config(tmp_path, "Rewind"), set[tuple[int, ...]]()

    class Told(Spiky):
        def progress(self, step: int, left_out: Collection[int] = ()) -> list[SourceProgress]:
            told.add(tuple(left_out))
            return super().progress(step, left_out)

    with pytest.raises(LossSpiked):
        train(config, alone(), batches=Told(config, 100))
    train(config, alone(), batches=Told(config, 100))
    assert told == {(), (SPIKE_STEP - 1,)}


def test_a_job_that_goes_on_from_the_checkpoint_of_another_leaves_out_its_batches(tmp_path: Path) -> None:
    run_to_the_end(tmp_path)
    start = CheckpointRoot(tmp_path / "root").committed()[0]
    more = {"training__total_steps": SPIKE_STEP + 6}
    longer = spiky_config(tmp_path, "Rewind", **more)
    resume = {"folder": str(start.path), "step": start.step, "digest": start.digest}
    other = spiky_config(tmp_path / "other", "Off", **more, job__uid="v", retention="external", resume=resume)
    losses = [event.loss for event in run(other)]
    assert losses == [event.loss for event in run(longer)]
    assert newest(tmp_path / "other")["lineage"]["skipped_batches"] == [SPIKE_STEP - 1]


def test_another_job_at_the_same_place_trains_every_batch(tmp_path: Path) -> None:
    run_to_the_end(tmp_path)
    other = spiky_config(tmp_path, "Off", job__uid="v", job__writer="0a1b2c3e", retention="external")
    alone_there = spiky_config(tmp_path / "other", "Off", retention="external")
    assert [event.loss for event in run(other, 1)] == [event.loss for event in run(alone_there, 1)]
