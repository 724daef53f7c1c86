"""The Checkpoints that the retention of a TrainingJob gives up."""

from __future__ import annotations

import pytest

from stoker.operator.domain.labels import EXPIRED
from stoker.operator.domain.plan import Key
from stoker.pod.causes import Cause
from testing.operator.training_world import JOB, Run


def test_retention_keeps_the_newest_verified_and_spares_pinned_ones() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 2})
    run.start()
    run.train(20, (run.save(10), run.save(20)))
    pinned = run.checkpoint(10)
    pinned["spec"]["pinned"] = True
    run.train(50, (run.save(10), run.save(20), run.save(30), run.save(40)))
    run.answer_tasks("delete", deleted=["a"])
    run.cluster.settle()
    assert sorted(c["spec"]["source"]["save"]["step"] for c in run.cluster.of_kind("Checkpoint")) == [10, 30, 40]


def test_pinned_and_used_checkpoints_take_no_place_of_those_that_are_kept() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 1})
    run.start()
    for step in (10, 20, 30):
        run.train(step, (run.save(step, None),))
        run.checkpoint(step)["spec"]["pinned"] = step > 10
        run.train(step, (run.save(step),))
    run.cluster.settle()
    assert sorted(c["spec"]["source"]["save"]["step"] for c in run.cluster.of_kind("Checkpoint")) == [10, 20, 30]


def test_two_checkpoints_of_one_save_take_one_place() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 2})
    run.start()
    run.train(10, (run.save(10),))
    asked = [_request(run, name) for name in ("mine", "theirs")]
    answers = {uid: {"state": "Done", "folder": run.folder(20)} for uid in asked}
    saves = [run.save(10), run.save(20, id_=asked[0])]
    run.cluster.report(
        run.gang[0], {"attempt": 0, "phase": "Training", "step": 20, "saves": saves, "requests": answers}
    )
    run.cluster.settle()
    kept = [one for one in run.cluster.of_kind("Checkpoint") if "deletionTimestamp" not in one["metadata"]]
    assert sorted(one["status"]["step"] for one in kept) == [10, 20, 20], "one save answers both requests"


def test_a_save_that_the_agent_still_reads_back_is_not_given_up() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 1})
    run.start()
    run.train(20, (run.save(10, None), run.save(20)))
    assert _steps(run) == [10, 20]
    run.train(20, (run.save(10), run.save(20)))
    run.answer_tasks("delete", deleted=["a"])
    assert _steps(run) == [20]


def test_no_verified_save_is_given_up_for_newer_ones_that_are_not() -> None:
    """The newest save is not known to be whole, so the one before it stays whatever `maxToKeep` allows."""
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 1})
    run.start()
    run.train(10, (run.save(10),))
    run.train(30, (run.save(10), run.save(20, None), run.save(30, None)))
    assert _steps(run) == [10, 20, 30]


@pytest.mark.parametrize(("pinned", "asked"), [(True, 1), (False, 2)], ids=["pinned", "unpinned"])
def test_a_manifest_that_asks_for_a_save_and_is_applied_again_asks_once_where_it_is_pinned(
    pinned: bool, asked: int
) -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 1})
    run.start()
    saves = (run.save(10, id_=_request(run, "kept-in-git", pinned=pinned)),)
    run.train(10, saves)
    run.train(20, (*saves, run.save(20)))
    run.answer_tasks("delete", deleted=["a"])
    if Key("Checkpoint", "default", "kept-in-git") not in run.cluster.objects:
        _request(run, "kept-in-git", pinned=pinned)
    assert [path for _, path, _ in run.cluster.calls] == ["/checkpoint"] * asked
    assert run.cluster.events.count("Expired") == asked - 1


def test_a_checkpoint_that_is_being_deleted_takes_no_place() -> None:
    """Deleted while an older one is kept: with the next save two would have been left of `maxToKeep: 2` but one."""
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 2, "deletionPolicy": "Delete"})
    run.start()
    run.train(20, (run.save(10), run.save(20)))
    newest = run.checkpoint(20)
    newest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    run.train(30, (run.save(10), run.save(20), run.save(30)))
    assert EXPIRED not in run.checkpoint(10)["metadata"]["labels"]
    run.train(40, (run.save(10), run.save(20), run.save(30), run.save(40)))
    assert run.checkpoint(10)["metadata"]["labels"][EXPIRED] == "true"


def test_retention_goes_on_while_a_job_is_suspended() -> None:
    run = Run()
    run.start()
    run.train(30, (run.save(10), run.save(20), run.save(30)))
    run.cluster.change_spec(JOB, lambda spec: spec.update(run={"suspend": True}))
    run.cluster.settle_once()
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED)
    run.cluster.settle()
    run.answer_tasks("list", saves=[])
    assert (run.status["phase"], _steps(run)) == ("Suspended", [10, 20, 30])
    run.cluster.change_spec(JOB, lambda spec: spec["checkpoint"].update(maxToKeep=1))
    run.cluster.settle()
    run.answer_tasks("delete", deleted=["a"])
    assert _steps(run) == [30]


def test_the_event_of_a_save_that_is_given_up_names_the_field_that_keeps_it() -> None:
    run = Run(checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 1})
    run.start()
    run.train(10, (run.save(10),))
    found = run.checkpoint(10)
    found["metadata"]["labels"][EXPIRED] = "true"
    events = run.cluster.plan(Key("Checkpoint", "default", found["metadata"]["name"])).events
    assert [event.message for event in events] == ["beyond checkpoint.maxToKeep of its job, and spec.pinned is not set"]


def _steps(run: Run) -> list[int]:
    return sorted(found["spec"]["source"]["save"]["step"] for found in run.cluster.of_kind("Checkpoint"))


def _request(run: Run, name: str, *, pinned: bool = False) -> str:
    """Ask for a save; return the uid by which it is answered."""
    source = {"jobRef": {"name": "run"}}
    made = run.cluster.add(
        {
            "apiVersion": "stoker.dev/v1alpha1",
            "kind": "Checkpoint",
            "metadata": {"name": name},
            "spec": {"source": source, "pinned": pinned},
        }
    )
    run.cluster.settle()
    return str(made["metadata"]["uid"])
