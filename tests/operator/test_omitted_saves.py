"""Saves that a job makes while the operator is away: every one gets its Checkpoint, however many there are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.pod.causes import Cause
from testing.operator.training_world import JOB, Run

KNOWN_TO_REPORT, KNOWN_TO_MESSAGE = 5, 3


def away(run: Run, last: int, end: str) -> None:
    """Save every step to `last` while no operator looks; then `end` says what has become of the gang."""
    leader, member = run.gang
    saves = [run.save(step) for step in range(1, last + 1)]
    kept = saves[-KNOWN_TO_REPORT:]
    report = {"attempt": run.attempt, "phase": "Training", "step": last, "saves": kept}
    run.cluster.report(leader, report | {"saves_omitted": len(saves) - len(kept)})
    if end == "running":
        return
    del run.cluster.reports[leader["metadata"]["uid"]]
    if end == "Completed":
        run.cluster.end(member, Cause.COMPLETED, step=last)
    else:
        run.cluster.kill(member)
    words = tuple(run.word(step) for step in range(1, last + 1))[-KNOWN_TO_MESSAGE:]
    if end == "killed":
        run.cluster.kill(leader)
    else:
        run.cluster.end(leader, Cause(end), step=last, saves=words, saves_omitted=len(saves) - len(words))


def answer_lists(run: Run, last: int, page: int) -> list[dict[str, Any]]:
    """Let list pods answer from a storage with a save of every step to `last`; return the pods."""
    answered = []
    while waiting := [pod for pod in run.cluster.pods("task") if is_list(pod) and pod["status"]["phase"] == "Pending"]:
        (pod,) = waiting
        after = int(pod["metadata"]["labels"].get("stoker.dev/after-step", 0))
        steps = range(after + 1, last + 1)
        saves = [{"folder": run.folder(step), "step": step, "digest": f"digest{step}"} for step in steps[:page]]
        run.cluster.run(pod)
        result = {"task": "list", "saves": saves, "omitted": len(steps) - len(saves)}
        run.cluster.end(pod, Cause.COMPLETED, result=result)
        answered.append(pod)
        run.cluster.settle()
    return answered


def is_list(pod: dict[str, Any]) -> bool:
    return bool(pod["metadata"]["labels"]["stoker.dev/task"] == "list")


def saved_steps(run: Run) -> list[int]:
    return sorted(found["spec"]["source"]["save"]["step"] for found in run.cluster.of_kind("Checkpoint"))


def verified_by_tasks(run: Run) -> list[int]:
    """Steps of the saves that a task verifies or has verified, of those that have a Checkpoint."""
    tasks = [pod for pod in run.cluster.pods("task") if pod["metadata"]["labels"]["stoker.dev/task"] == "verify"]
    uids = {pod["metadata"]["labels"]["stoker.dev/checkpoint-uid"] for pod in tasks}
    found = [one for one in run.cluster.of_kind("Checkpoint") if one["metadata"]["uid"] in uids]
    return sorted(one["spec"]["source"]["save"]["step"] for one in found)


def answer_verify(run: Run, step: int, *, ok: bool = True) -> None:
    uid = run.checkpoint(step)["metadata"]["uid"]
    (pod,) = (p for p in run.cluster.pods("task") if p["metadata"]["labels"].get("stoker.dev/checkpoint-uid") == uid)
    run.cluster.run(pod)
    result = {"task": "verify", "ok": ok, "problems": [] if ok else ["a piece is cut"]}
    run.cluster.end(pod, Cause.COMPLETED if ok else Cause.TASK_FAILED, result=result)
    run.cluster.settle()


@settings(max_examples=15, deadline=None)
@given(
    seen=st.integers(0, 4),
    last=st.integers(1, 13),
    page=st.integers(2, 6),
    end=st.sampled_from(["running", "Completed", "RankFailed", "Interrupted", "killed"]),
)
def test_each_save_gets_its_checkpoint_however_long_the_operator_was_away(
    seen: int, last: int, page: int, end: str
) -> None:
    run = Run()
    run.start()
    run.train(seen, tuple(run.save(step) for step in range(1, seen + 1)))
    last = max(seen, last)
    away(run, last, end)
    run.cluster.settle()
    run.cluster.collect()
    run.cluster.settle()
    answer_lists(run, last, page)
    assert saved_steps(run) == list(range(1, last + 1))


def test_a_save_that_a_running_job_reports_no_more_is_verified_by_a_task() -> None:
    """Its agent has read it back long ago, and will not say so again."""
    run = Run()
    run.start()
    away(run, 9, "running")
    run.cluster.settle()
    answer_lists(run, 9, 4)
    run.answer_tasks("verify")
    by = {c["spec"]["source"]["save"]["step"]: c["status"].get("verifiedBy") for c in run.cluster.of_kind("Checkpoint")}
    assert by == dict.fromkeys(range(1, 5), "Task") | dict.fromkeys(range(5, 10), "Agent")


@pytest.mark.parametrize("end", ["running", "Completed"])
def test_nothing_is_listed_where_the_last_word_reaches_back_to_the_newest_checkpoint(end: str) -> None:
    run = Run()
    run.start()
    run.train(20, tuple(run.save(step) for step in range(1, 21)))
    away(run, 22, end)
    run.cluster.settle()
    assert saved_steps(run) == list(range(1, 23))
    assert not any(map(is_list, run.cluster.pods("task")))


@pytest.mark.parametrize("end", ["running", "Completed"])
def test_saves_of_the_operators_absence_count_for_max_to_keep_and_are_not_verified_first(end: str) -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 2})
    run.start()
    away(run, 12, end)
    run.cluster.settle()
    answer_lists(run, 12, 4)
    assert not verified_by_tasks(run), "the newest ones are verified, and the others beyond what is kept"
    run.answer_tasks("delete", deleted=["all"])
    assert saved_steps(run) == [11, 12]


def test_of_saves_without_a_verdict_the_newest_are_verified_first() -> None:
    """The leader was killed: tasks list what it left, and no agent has said what of it is whole."""
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 2})
    run.start()
    away(run, 9, "killed")
    for _ in range(3):
        run.cluster.settle()
        run.cluster.collect()
        answer_lists(run, 9, 9)
    assert verified_by_tasks(run) == [8, 9]
    assert "newer saves" in run.checkpoint(7)["status"]["message"]
    answer_verify(run, 9, ok=False)
    run.cluster.settle()
    assert verified_by_tasks(run) == [7, 8, 9], "the one that is corrupt takes no place"
    answer_verify(run, 8)
    answer_verify(run, 7)
    run.next_attempt()
    assert verified_by_tasks(run) == [6, 9], "save 8 is resumed, and takes no place while it is used"
    answer_verify(run, 6)
    run.answer_tasks("delete", deleted=["all"])
    assert saved_steps(run) == [6, 7, 8, 9]
    assert run.checkpoint(9)["status"]["phase"] == "Corrupt"


def test_a_pinned_save_is_verified_whatever_is_newer() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 1})
    run.start()
    away(run, 4, "killed")
    for _ in range(3):
        run.cluster.settle_once()
        run.cluster.collect()
    answer_lists(run, 4, 9)
    run.checkpoint(2)["spec"]["pinned"] = True
    run.cluster.settle()
    assert verified_by_tasks(run) == [2, 4]


def test_a_job_without_time_to_live_is_not_deleted_before_its_saves_are_objects() -> None:
    run = Run(run={"ttlSecondsAfterFinished": 0})
    run.start()
    away(run, 9, "Completed")
    run.cluster.settle()
    assert run.status["phase"] == "Completed"
    answer_lists(run, 9, 4)
    assert saved_steps(run) == list(range(1, 10))
    assert JOB not in run.cluster.objects


def test_a_save_on_demand_is_no_end_of_the_list() -> None:
    """A Checkpoint asks for a save while older ones are still being listed: those keep their turn."""
    run = Run()
    run.start()
    away(run, 9, "running")
    run.cluster.settle()
    source = {"source": {"jobRef": {"name": "run"}}}
    asked = {"apiVersion": "stoker.dev/v1alpha1", "kind": "Checkpoint", "metadata": {"name": "now"}, "spec": source}
    run.cluster.add(asked)
    run.cluster.settle()
    uid = next(c["metadata"]["uid"] for c in run.cluster.of_kind("Checkpoint") if c["metadata"]["name"] == "now")
    newest = (*(run.save(step) for step in range(6, 10)), run.save(10, id_=uid))
    run.cluster.report(
        run.gang[0], {"attempt": 0, "phase": "Training", "step": 10, "saves": newest, "saves_omitted": 5}
    )
    run.cluster.settle()
    answer_lists(run, 10, 4)
    found = {c["status"]["folder"] for c in run.cluster.of_kind("Checkpoint")}
    assert found == {run.folder(step) for step in range(1, 11)}


@pytest.mark.parametrize(("end", "known"), [("running", [5, 6, 7, 8, 9]), ("Completed", [7, 8, 9])])
def test_a_list_that_never_succeeds_does_not_hold_the_known_saves_back_and_is_told_once(
    end: str, known: list[int]
) -> None:
    run = Run()
    run.start()
    away(run, 9, end)
    for _ in range(10):
        run.cluster.settle()
        run.answer_tasks("list", ok=False, problems=["away"])
        run.cluster.advance(3600)
    assert saved_steps(run) == known
    assert run.cluster.events.count("SavesNotListed") == 1
