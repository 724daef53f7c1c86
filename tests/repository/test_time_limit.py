"""A test that takes too long fails for that, whatever it did just then."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testing.time_limit import OutOfTime


def test_a_property_that_takes_too_long_blames_none_of_its_cases() -> None:
    if not callable(signal.getsignal(signal.SIGALRM)):
        pytest.skip("tests have no time limit")
    judged = []

    @settings(database=None, max_examples=20)
    @given(st.integers())
    def judge(value: int) -> None:
        judged.append(value)
        if len(judged) == 3:
            signal.raise_signal(signal.SIGALRM)

    with pytest.raises(OutOfTime, match="from pytest-timeout"):
        judge()
    assert len(judged) == 3, "it ends at once"
