"""Learning-rate schedules against closed forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.trainer.protocol.config import OptimizationConfig
from stoker.trainer.rank.schedule import learning_rate


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        pytest.param("constant", 1, 0.25, id="warm-up begins above zero"),
        pytest.param("constant", 4, 1.0, id="warm-up ends at the full rate"),
        pytest.param("constant", 24, 1.0, id="constant stays"),
        pytest.param("cosine", 5, 1.0, id="the step after warm-up has the full rate too"),
        pytest.param("linear", 24, 0.145, id="the last step is not wasted"),
        pytest.param("linear", 15, 0.55, id="linear is half way in the middle"),
        pytest.param("linear", 25, 0.1, id="linear reaches the floor after the last step"),
        pytest.param("cosine", 15, 0.55, id="cosine is half way in the middle"),
        pytest.param("cosine", 10, 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2, id="cosine a quarter of the way"),
        pytest.param("cosine", 25, 0.1, id="cosine reaches the floor after the last step"),
        pytest.param("cosine", 99, 0.1, id="cosine stays at the floor"),
    ],
)
def test_rate_follows_the_closed_form(schedule: str, step: int, expected: float) -> None:
    floor = 0.0 if schedule == "constant" else 0.1
    config = OptimizationConfig.model_validate(
        {"learning_rate": 1.0, "min_learning_rate": floor, "schedule": schedule, "warmup_steps": 4}
    )
    assert learning_rate(config, step, 24) == pytest.approx(expected, rel=1e-12)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 50), st.integers(1, 100), st.integers(1, 100))
def test_rate_stays_between_zero_and_the_peak(schedule: str, warmup: int, total: int, step: int) -> None:
    config = OptimizationConfig.model_validate({"learning_rate": 3e-4, "schedule": schedule, "warmup_steps": warmup})
    assert 0.0 <= learning_rate(config, step, total) <= 3e-4
