"""Which pods' logs are printed, and which lines."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.cli.log_selection import LogSelection, NoSuchLog, has_ended, parse_duration_s


def pod(name: str, attempt: int | None = None) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {} if attempt is None else {"stoker.dev/attempt": str(attempt)}}}


OF_A_JOB = [pod("a1-0", 1), pod("a1-1", 1), pod("a2-0", 2), pod("task")]


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        (LogSelection(), ["a2-0", "task"]),
        (LogSelection(previous=True), ["a1-0", "a1-1", "task"]),
        (LogSelection(attempt=1), ["a1-0", "a1-1", "task"]),
    ],
)
def test_the_pods_of_one_attempt_are_chosen(selection: LogSelection, names: list[str]) -> None:
    assert [one["metadata"]["name"] for one in selection.pods_of(OF_A_JOB)] == names


def test_engines_have_no_attempt() -> None:
    engines = [pod("chat-0"), pod("chat-1")]
    assert LogSelection().pods_of(engines) == engines
    with pytest.raises(NoSuchLog, match="--attempt and --previous are for the pods of a job"):
        LogSelection(previous=True).pods_of(engines)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (LogSelection(attempt=7), "no pod of attempt 7 is left; there are those of 1, 2"),
        (LogSelection(previous=True), "no pod of an earlier attempt is left, only of attempt 2"),
    ],
)
def test_an_attempt_without_pods_is_an_error(selection: LogSelection, message: str) -> None:
    with pytest.raises(NoSuchLog, match=message):
        selection.pods_of([one for one in OF_A_JOB if not selection.previous or "a1" not in one["metadata"]["name"]])


def test_the_lines_of_a_rank_are_its_own_and_the_tail_counts_them() -> None:
    lines = ["step 1/9  loss 2", "[rank 1] a", "[rank 12] b", "[rank 1] c", "[rank 1] d"]
    assert list(LogSelection(rank=1).lines_of(lines)) == ["[rank 1] a", "[rank 1] c", "[rank 1] d"]
    assert list(LogSelection(rank=1, tail=2).last_of(lines)) == ["[rank 1] c", "[rank 1] d"]
    assert (LogSelection(rank=1, tail=2).request.tail, LogSelection(tail=2).request.tail) == (None, 2)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1h30m", 5400), ("2h0m1s", 7201)])
def test_a_time_is_a_number_of_seconds(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "0s", "m5", "1m1h", "-5m"])
def test_what_is_no_time_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is no time such as 90s, 5m or 1h30m"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("kind", "phase", "ended"),
    [("TrainingJob", "Running", False), ("TrainingJob", "Suspended", True), ("InferenceDeployment", "Failed", False)],
)
def test_an_object_that_may_get_pods_goes_on(kind: str, phase: str, ended: bool) -> None:
    assert has_ended({"kind": kind, "status": {"phase": phase}}) is ended
    assert not has_ended({"kind": kind})
