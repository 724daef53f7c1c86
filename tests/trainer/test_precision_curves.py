"""300 steps of a tiny model in each narrow precision beside bf16: the losses are the same within a tolerance.

`python -m bench.precision_curves` shows the same for a larger model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.trainer.protocol.messages import StepEvent
from testing.trainer.layouts import MODEL
from testing.trainer.tiny_run import ChainBatches, RecordingChannel, alone, tiny_config, train

STEPS, WINDOW = 300, 50
"""Losses are compared as means over a window."""
TOLERANCE = {"fp16": 0.005, "fp8 Tensorwise": 0.03, "fp8 Rowwise": 0.03}
"""Largest relative difference of a mean from that of bf16, also while the loss falls to a quarter."""
CHANGES: dict[str, dict[str, Any]] = {
    "fp16": {"memory__precision": "fp16"},
    "fp8 Tensorwise": {"memory__precision": "fp8"},
    "fp8 Rowwise": {"memory__precision": "fp8", "memory__fp8_recipe": "Rowwise"},
}

Losses = NDArray[np.float64]


def losses(folder: Path, changes: dict[str, Any]) -> Losses:
    config = tiny_config(
        folder,
        training__total_steps=STEPS,
        training__deterministic="Off",
        training__micro_batch_size=4,
        training__global_batch_size=4,
        training__sequence_length=16,
        optimization__learning_rate=0.003,
        **changes,
    )
    context = alone()
    train(config, context, MODEL, ChainBatches(config, MODEL.vocab_size))
    assert isinstance(context.channel, RecordingChannel)
    return np.array([event.loss for event in context.channel.all(StepEvent)])


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    return losses(tmp_path_factory.mktemp("bf16"), {"memory__precision": "bf16"})


@pytest.mark.parametrize("name", CHANGES)
def test_the_curve_is_that_of_bf16_within_the_tolerance(tmp_path: Path, expected: Losses, name: str) -> None:
    found = losses(tmp_path, CHANGES[name])
    assert len(found) == len(expected) == STEPS
    assert not np.array_equal(found, expected), "it is another precision"
    np.testing.assert_allclose(means(found), means(expected), rtol=TOLERANCE[name])


def test_the_model_learns(expected: Losses) -> None:
    assert means(expected)[-1] < 0.35 * means(expected)[0]


def means(values: Losses) -> Losses:
    found: Losses = values.reshape(-1, WINDOW).mean(1)
    return found
