"""Prompt tokens of a step: a prompt's number of steps is what taking them one by one gives."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.step_tokens import BACKLOG_STEPS, prompt_steps, prompt_tokens


@given(st.integers(1, 3000), st.integers(0, 100_000), st.integers(1, 4096))
def test_a_step_takes_a_part_of_the_backlog_within_its_limits(mixed: int, backlog: int, most: int) -> None:
    found = prompt_tokens(mixed, backlog, most)
    assert min(mixed, most) <= found <= most
    assert found == most or found * BACKLOG_STEPS >= backlog


@given(st.one_of(st.integers(1, 3000), st.just(math.inf)), st.integers(1, 30_000), st.integers(1, 4096))
def test_steps_are_counted_as_they_are_taken(mixed: float, tokens: int, most: int) -> None:
    left, steps = float(tokens), 0
    while left > 0:
        left -= prompt_tokens(mixed, left, most)
        steps += 1
    assert prompt_steps(mixed, tokens, most) == steps
