"""The bytes of bodies that a program holds."""

from __future__ import annotations

import pytest

from stoker.pod.body_budget import BodyBudget, BodyBudgetSpent


def test_what_does_not_fit_is_refused_and_everything_is_given_back() -> None:
    budget = BodyBudget(10)
    with budget.share() as first, budget.share() as second:
        first.take(6)
        second.take(4)
        with pytest.raises(BodyBudgetSpent, match="10 bytes"):
            second.take(1)
        assert budget.held_bytes == 10
        first.release()
        first.release()
        second.take(6)
        assert budget.held_bytes == 10
    assert budget.held_bytes == 0


def test_a_request_that_fails_gives_its_bytes_back() -> None:
    budget = BodyBudget(10)

    def fail() -> None:
        with budget.share() as share:
            share.take(10)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert budget.held_bytes == 0
