"""A job whose rendering was pinned by a version with other defaults: the next attempt is that of the manifest."""

from __future__ import annotations

from stoker.operator.domain.settings import Settings
from stoker.pod.causes import Cause
from testing.operator.training_world import JOB, Run

OLDER = "0123456789abcdef"


def next_image(run: Run) -> str:
    """End the attempt by a lost process and return the image of the next one."""
    for pod in run.gang:
        run.cluster.end(pod, Cause.RANK_KILLED)
    run.next_attempt()
    return str(run.gang[0]["spec"]["containers"][0]["image"])


def upgraded() -> Run:
    """A running job after an upgrade to a version with another hash of its manifest and another image."""
    run = Run()
    run.start()
    run.job["status"]["pinned"]["intent"] = OLDER
    run.cluster.settings = Settings(operator_version="9.9.9", runtime_image="new:9", control_image="new:9")
    return run


def test_the_next_attempt_of_an_unedited_job_runs_what_the_one_before_ran() -> None:
    run = upgraded()
    before = str(run.gang[0]["spec"]["containers"][0]["image"])
    assert next_image(run) == before != "new:9"


def test_an_edit_after_the_upgrade_takes_the_new_version() -> None:
    run = upgraded()
    run.cluster.change_spec(JOB, lambda spec: spec["workers"].update(env=[{"name": "MORE", "value": "1"}]))
    run.cluster.reconcile(JOB)
    assert next_image(run) == "new:9"
