"""A wait goes on while the cluster does not answer, and ends with a refusal."""

from __future__ import annotations

import pytest

from stoker.cli.outage import LONGEST_S, Outage
from stoker.operator.cluster.interface import ClusterError, Forbidden, NotFound, ServerError, TooManyRequests


class Answers:
    """Gives what it is told, one after the other."""

    def __init__(self, *answers: ClusterError | str) -> None:
        self.answers = list(answers)

    def __call__(self) -> str:
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            return answer
        raise answer


def test_an_outage_is_told_once_and_when_it_is_over() -> None:
    said: list[str] = []
    outage = Outage(said.append, lambda error: f"no answer: {error}")
    question = Answers(ClusterError("cut"), ServerError("503"), TooManyRequests("429"), "a", "b")
    assert [outage.ask(question) for _ in range(5)] == [None, None, None, "a", "b"]
    assert said == ["no answer: cut; asking again for 5 minutes", "the cluster answers again"]


def test_an_outage_that_lasts_ends_the_wait() -> None:
    time_s = 0.0
    outage = Outage(lambda _: None, monotonic=lambda: time_s)
    assert outage.ask(Answers(ClusterError("cut"))) is None
    time_s = LONGEST_S + 1
    with pytest.raises(ClusterError, match="cut"):
        outage.ask(Answers(ClusterError("cut")))


@pytest.mark.parametrize("refusal", [Forbidden("no right"), NotFound("gone")])
def test_a_refusal_ends_the_wait_at_once(refusal: ClusterError) -> None:
    with pytest.raises(type(refusal)):
        Outage(lambda _: None).ask(Answers(refusal))
