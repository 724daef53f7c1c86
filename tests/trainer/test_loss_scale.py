"""fp16 training: the dynamic loss scale, skipped steps, and its state in checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.pod.causes import Cause
from stoker.trainer.agent.console import step_line
from stoker.trainer.errors import NonFinite
from stoker.trainer.protocol.messages import StepEvent, StopCommand
from stoker.trainer.rank.loss_scale import LARGEST, SMALLEST, LossScale
from testing.trainer.tiny_run import alone, tiny_config, train


def test_the_scale_halves_at_an_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(8.0, grow_after=3)
    found = []
    for is_finite in (True, True, False, True, True, True, False):
        found.append((scale.overflows(is_finite), scale.scale))
    assert found == [(False, 8), (False, 8), (True, 4), (False, 4), (False, 4), (False, 8), (True, 4)]


def test_an_overflow_at_the_smallest_scale_is_not_skipped() -> None:
    scale = LossScale(2.0)
    assert [scale.overflows(False) for _ in range(3)] == [True, False, False]
    assert scale.scale == SMALLEST


@given(st.lists(st.booleans(), max_size=200), st.integers(1, 10**9))
def test_the_factor_is_a_power_of_two_and_the_state_goes_on_from_a_checkpoint(steps: list[bool], tokens: int) -> None:
    scale = LossScale(grow_after=5)
    for index, is_finite in enumerate(steps):
        scale.overflows(is_finite)
        other = LossScale(grow_after=5)
        other.restore(scale.state())
        if index % 3 == 0:
            scale = other
        assert SMALLEST <= scale.scale <= LARGEST
        assert math.frexp(scale.factor(tokens))[0] == 0.5
    reference = LossScale(grow_after=5)
    assert all(reference.overflows(is_finite) in (True, False) for is_finite in steps)
    assert reference.state() == scale.state()


def events(folder: Path, scale: float | None = None, **changes: Any) -> list[StepEvent]:
    context = alone()
    train(tiny_config(folder, **changes), context, loss_scale=LossScale(scale) if scale else None)
    found: list[StepEvent] = context.channel.all(StepEvent)  # type: ignore[attr-defined]
    return found


def norms(found: list[StepEvent]) -> list[float]:
    return [event.grad_norm for event in found if event.grad_norm is not None]


def test_fp16_learns_nearly_like_fp32(tmp_path: Path) -> None:
    long: dict[str, Any] = {"training__total_steps": 12, "optimization__schedule": "constant"}
    exact = events(tmp_path / "fp32", **long)
    half = events(tmp_path / "fp16", **long, memory__precision="fp16")
    np.testing.assert_allclose([event.loss for event in half], [event.loss for event in exact], rtol=0.01)
    np.testing.assert_allclose(norms(half), norms(exact), rtol=0.05)
    assert {event.skipped_steps for event in half} == {0}
    assert {event.loss_scale for event in half} == {2.0**16}
    assert {event.loss_scale for event in exact} == {None}


TOO_LARGE = 2.0**19
"""A scale at which the first gradients overflow."""


def test_an_overflow_changes_no_weight_and_is_counted(tmp_path: Path) -> None:
    found = events(
        tmp_path, TOO_LARGE, memory__precision="fp16", checkpoint__interval_steps=1, checkpoint__max_to_keep=9
    )
    overflows = [event for event in found if event.grad_norm is None]
    assert found[0] in overflows
    assert 0 < len(overflows) < len(found)
    assert found[-1].skipped_steps == len(overflows)
    assert found[-1].loss_scale == TOO_LARGE / 2 ** len(overflows)
    assert "norm overflow, skipped" in step_line(found[0])
    first, last = (CheckpointReader(CheckpointRoot(tmp_path / "root").committed()[index].path) for index in (-1, 0))
    assert {first.manifest.step, last.manifest.step} == {1, 6}
    newest = max(first, last, key=lambda reader: reader.manifest.step)
    assert newest.manifest.meta["loss_scale"]["scale"] == found[-1].loss_scale
    assert newest.manifest.meta["skipped_steps"] == len(overflows)
    oldest = min(first, last, key=lambda reader: reader.manifest.step)
    moments = [name for name in oldest.manifest.tensors if name.startswith("optimizer.")]
    assert moments
    for name in moments:
        assert not oldest.read(name).any()


def test_a_resumed_fp16_run_repeats_scale_and_losses_bitwise(tmp_path: Path) -> None:
    def facts(found: list[StepEvent]) -> list[Any]:
        return [(event.step, event.loss, event.grad_norm, event.loss_scale, event.skipped_steps) for event in found]

    whole = facts(events(tmp_path / "whole", TOO_LARGE, memory__precision="fp16"))
    config = tiny_config(tmp_path / "cut", memory__precision="fp16")
    pieces = []
    for _ in range(3):
        context = alone()
        context.channel.put(StopCommand(mode="suspend"))
        assert train(config, context, loss_scale=LossScale(TOO_LARGE)) == Cause.INTERRUPTED
        pieces += facts(context.channel.all(StepEvent))  # type: ignore[attr-defined]
    assert pieces == whole[:3]
    context = alone()
    train(config, context)
    assert pieces + facts(context.channel.all(StepEvent)) == whole  # type: ignore[attr-defined]


def test_a_loss_that_is_not_finite_ends_an_fp16_run(tmp_path: Path) -> None:
    with pytest.raises(NonFinite, match="step"):
        events(tmp_path, memory__precision="fp16", optimization__learning_rate=1e30, optimization__gradient_clipping=0)
