"""How much of a prompt runs beside decodes, how long a step is left open, how often graphs are captured: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.config import EngineConfig
from stoker.engine.core.capture_pace import CapturePace
from stoker.engine.core.step_budget import StepBudget
from stoker.engine.core.step_clock import FEWEST, MARGIN_S, StepClock
from stoker.engine.execution.pass_shape import TOKENS
from stoker.engine.plan import choose_mixed_tokens, mixed_tokens
from stoker.model.known_shapes import LLAMA31_8B, QWEN3_30B_A3B
from stoker.pod.step_tokens import BACKLOG_STEPS

BUDGET = StepBudget(2048, 512, TOKENS)


@pytest.mark.parametrize(
    ("decodes", "backlog", "wanted"),
    [
        pytest.param(0, 100, 2048, id="nothing decodes"),
        pytest.param(13, 512, 528, id="one prompt, rounded up to a graph"),
        pytest.param(100, 512, 640, id="many decodes"),
        pytest.param(13, 512 * BACKLOG_STEPS, 528, id="a backlog that steps of this size work off"),
        pytest.param(13, 900 * BACKLOG_STEPS, 1024, id="a larger one"),
        pytest.param(13, 100_000, 2048, id="more than any step works off"),
    ],
)
def test_a_step_takes_more_of_prompts_where_more_wait(decodes: int, backlog: int, wanted: int) -> None:
    assert BUDGET.tokens(decodes, backlog) == wanted


@given(
    most=st.integers(1, 4096),
    mixed=st.none() | st.integers(1, 4096),
    sizes=st.sampled_from([(), TOKENS]),
    decodes=st.integers(0, 4096),
    backlog=st.integers(0, 10**6),
)
def test_every_step_has_room_for_a_prompt_and_none_is_too_long(
    most: int, mixed: int | None, sizes: tuple[int, ...], decodes: int, backlog: int
) -> None:
    budget = StepBudget(most, mixed, sizes)
    tokens = budget.tokens(decodes, backlog)
    assert tokens <= most
    assert tokens > decodes or decodes >= most
    assert tokens <= budget.tokens(decodes, backlog + 1)
    if mixed is not None and decodes:
        assert tokens == most or tokens >= decodes + mixed


@given(st.integers(10**5, 10**12), st.integers(1, 8192))
def test_larger_models_take_fewer_prompt_tokens_beside_decodes(parameters: int, most: int) -> None:
    tokens = mixed_tokens(parameters, most)
    assert 1 <= tokens <= most
    assert tokens >= mixed_tokens(2 * parameters, most)


def test_tokens_go_by_the_parameters_that_each_meets() -> None:
    """All experts of Qwen3-30B-A3B count 30 billion, of which a token meets 3: by all it would take 128."""
    one, two = (
        EngineConfig.model_validate({"model": {"path": "/m"}, "parallelism": {"tensor": ranks}}) for ranks in (1, 2)
    )
    assert [choose_mixed_tokens(config, LLAMA31_8B, "cuda") for config in (one, two)] == [512, 1024]
    assert choose_mixed_tokens(one, QWEN3_30B_A3B, "cuda") == 1216


DECODES = (False, 13)


def test_a_step_of_a_size_of_which_too_little_is_known_is_not_waited_for() -> None:
    clock = StepClock()
    assert clock.open_until(DECODES, 7.0) == 7.0
    for _ in range(FEWEST):
        clock.record((True, 13), 0.005)
        assert clock.open_until(DECODES, 7.0) == 7.0
    clock.record(DECODES, 0.5)  # it loads a kernel
    assert clock.open_until(DECODES, 7.0) == 7.0
    clock.record(DECODES, 0.005)
    assert clock.open_until(DECODES, 7.0) == pytest.approx(7.005 - MARGIN_S)


def test_the_next_step_stays_open_until_a_margin_before_the_shortest_recent_end() -> None:
    clock = StepClock()
    for duration_s in (0.002, 0.007, 0.005, 0.006, 0.008):
        clock.record(DECODES, duration_s)
    assert clock.open_until(DECODES, 7.0) == pytest.approx(7.005 - MARGIN_S)  # the first is forgotten
    clock.record(DECODES, MARGIN_S / 2)
    assert clock.open_until(DECODES, 7.0) == 7.0  # shorter than the margin


@given(st.lists(st.floats(0.001, 0.1), min_size=1, max_size=30))
def test_captures_take_their_share_of_the_time(captures_s: list[float]) -> None:
    pace, now_s, began_s = CapturePace(share=0.1), 5.0, 5.0
    for took_s in captures_s:
        while not pace.due(now_s):
            now_s += 0.01
        pace.record(now_s, now_s + took_s)
        now_s += took_s
    assert sum(captures_s[:-1]) <= 0.1 * (now_s - began_s)
