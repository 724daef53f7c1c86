"""The Checkpoints that the retention of a TrainingJob gives up."""

from __future__ import annotations

from testing.operator.training_world import Run


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
