"""A refused edit changes nothing but a condition, at any moment of a life; an accepted edit is never silent.

The property runs every kind twice with the same events: once with the refused edit, once without. A kind joins by
adding its `Life` to `LIVES`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.operator.domain.plan import Key, Object, Plan
from stoker.operator.domain.unsupported import unsupported
from stoker.pod.causes import Cause
from testing.operator import serving_world
from testing.operator.serving_world import CHAT, POOL, Serving
from testing.operator.simulated_cluster import SimulatedCluster
from testing.operator.training_world import EVENTS, JOB, Run, disturb
from testing.operator.unbuilt import BUILT, UNBUILT, UNBUILT_FIELD

REFUSED = "EditRefused"
PENDING = "EditPending"


@dataclass(frozen=True)
class Life:
    """One kind, with the events that may happen to one resource of it."""

    begin: Callable[[], tuple[SimulatedCluster, Callable[[str, int], None]]]
    """A new cluster with the resource, and the function that makes one event happen."""
    key: Key
    edits: tuple[dict[str, Any], ...]
    """Merge patches of the spec, each of which this version refuses, some with changes that it could carry out."""
    events: st.SearchStrategy[list[tuple[str, int]]] = EVENTS
    last: tuple[str, int] = ("job", 6)
    """A whole pass over the resource, so that its condition is written."""


@cache
def placed() -> Run:
    run = Run(run={"backoffLimit": 1000}, checkpoint={"storage": {"claimName": "claim"}, "maxToKeep": 3})
    run.cluster.settle()  # a job that was refused from its first pass on is another story: it stalls
    return run


@cache
def ready() -> Serving:
    made = Serving(replicas=2)
    made.checkpoint(5)
    for _ in range(6):  # the first engines are ready
        made.cluster.settle_once()
        made.live()
    return made


def training() -> tuple[SimulatedCluster, Callable[[str, int], None]]:
    run = copy.deepcopy(placed())

    def happen(event: str, number: int) -> None:
        disturb(run, event, 6 if event in {"job", "checkpoints"} else number)

    return run.cluster, happen


def serving() -> tuple[SimulatedCluster, Callable[[str, int], None]]:
    made = copy.deepcopy(ready())

    def happen(event: str, number: int) -> None:
        serving_world.disturb(made, event, 6 if event in {"deployment", "pool"} else number)

    return made.cluster, happen


def serving_pool() -> tuple[SimulatedCluster, Callable[[str, int], None]]:
    cluster, happen = serving()
    cluster.reconcilers = {"EnginePool": cluster.reconcilers["EnginePool"]}  # the other would take the edit back

    def happen_to_pool(event: str, number: int) -> None:
        if event != "deployment":
            happen(event, number)

    return cluster, happen_to_pool


def revision(name: str, share: int, **template: Any) -> dict[str, Any]:
    pod = {"spec": {"containers": [{"name": "main", "image": "other:2"}], "volumes": []}}
    config = {"identity": {"revision": ""}}
    return {"name": name, "share": share, "template": {"config": config, "pod": pod, **template}}


SERVING_EVENTS = serving_world.EVENTS.map(lambda events: [event for event in events if event[0] != "scale"])
"""Events without edits of the spec, which would take effect in one of the two worlds only."""

COPIES = {"parallelism": {"data": 3}}
"""Of the model in one replica: not over two pods."""

LIVES = {
    "TrainingJob": Life(
        begin=training,
        key=JOB,
        edits=(
            UNBUILT,
            {**UNBUILT, "workers": {"replicas": 4}},
            {**UNBUILT, "checkpoint": {"maxToKeep": 1, "deletionPolicy": "Delete"}},
            {**UNBUILT, "run": {"backoffLimit": 0}, "workers": {"image": "other:2"}},
        ),
    ),
    "InferenceDeployment": Life(
        begin=serving,
        key=CHAT,
        edits=(
            {"router": {"policy": "cacheAware"}, "engine": {"attention": "cudnn"}},
            {"engine": {"attention": "cudnn"}},
            {"router": {"image": "other:2", "replicas": 3}, "engine": {"seed": 7, "attention": "cudnn"}},
            {
                "rollout": {"type": "canary", "canary": {"steps": [{"percent": 10}]}, "paused": True},
                "engine": {"attention": "cudnn"},
                "model": {"checkpointSelector": {"jobRef": {"name": "another-run"}}},
            },
            {"pools": [{"name": "main", "replicas": 0, "podsPerReplica": 2, "parallelism": {"data": 3}}]},
            {"pools": [{"name": "other", "replicas": 1, "parallelism": {"data": 2}, "podsPerReplica": 3}]},
        ),
        events=SERVING_EVENTS,
        last=("deployment", 6),
    ),
    "EnginePool": Life(
        begin=serving_pool,
        key=POOL,
        edits=(
            {"revisions": [revision("a", 70), revision("b", 30, podsPerReplica=2, config=COPIES)], "paused": True},
            {"revisions": [revision("a", 100, podsPerReplica=2, config=COPIES)], "maxUnavailable": 2},
        ),
        events=SERVING_EVENTS,
        last=("pool", 6),
    ),
}
"""Lives by kind."""


@pytest.mark.parametrize("kind", LIVES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_refused_edit_changes_nothing_but_its_condition(kind: str, data: st.DataObject) -> None:
    life = LIVES[kind]
    events = data.draw(life.events, label="events")
    edit = data.draw(st.sampled_from(life.edits), label="edit")
    at = data.draw(st.integers(0, len(events)), label="when")
    until = data.draw(st.integers(at, len(events) + 1), label="until")
    (edited, happen), (plain, happen_too) = life.begin(), life.begin()
    before: dict[str, Any] = {}
    for number, (event, argument) in enumerate([*events, life.last]):
        if number == at and life.key in edited.objects:
            before = copy.deepcopy(edited.objects[life.key]["spec"])
            edited.change_spec(life.key, lambda spec: merge(spec, edit))
            assert unsupported(kind, edited.objects[life.key]["spec"])
        if number == until and before and life.key in edited.objects:
            take_back(edited, life.key, edit, before)
        happen(event, argument)
        happen_too(event, argument)
        assert world(edited, life.key) == world(plain, life.key)
        assert plan_of(edited, life.key) == plan_of(plain, life.key)
    if life.key in edited.objects:
        refused = [item["message"] for item in conditions(edited, life.key, REFUSED)]
        assert bool(refused) is (at <= len(events) < until), refused


def take_back(cluster: SimulatedCluster, key: Key, edit: dict[str, Any], before: dict[str, Any]) -> None:
    """Restore the fields of the edit; other fields may have changed since."""

    def restore(spec: dict[str, Any], patch: dict[str, Any], old: dict[str, Any]) -> None:
        for name, inner in patch.items():
            if isinstance(inner, dict) and isinstance(spec.get(name), dict) and name in old:
                restore(spec[name], inner, old[name])
            elif name in old:
                spec[name] = copy.deepcopy(old[name])
            elif isinstance(inner, dict) and set(spec.get(name, {})) - set(inner):
                restore(spec[name], inner, {})
            else:
                spec.pop(name, None)

    cluster.change_spec(key, lambda spec: restore(spec, edit, before))


def merge(spec: dict[str, Any], patch: dict[str, Any]) -> None:
    for name, value in patch.items():
        if isinstance(value, dict):
            merge(spec.setdefault(name, {}), value)
        elif value is None:
            spec.pop(name, None)
        else:
            spec[name] = copy.deepcopy(value)  # the table of edits stays as it is


def world(cluster: SimulatedCluster, key: Key) -> Any:
    """Return everything that a user or a pod can observe, apart from the edit and its condition."""
    objects = {str(found): comparable(cluster.objects[found], edited=found == key) for found in cluster.objects}
    return objects, cluster.calls, [event for event in cluster.events if event != REFUSED]


def plan_of(cluster: SimulatedCluster, key: Key) -> Plan:
    """Return the next pass's actions without the status, which is compared once it is written."""
    plan = cluster.plan(key)
    return Plan(
        finalizers=plan.finalizers,
        create=plan.create,
        apply=plan.apply,
        patch=plan.patch,
        delete=plan.delete,
        calls=plan.calls,
        events=tuple(event for event in plan.events if event.reason != REFUSED),
        requeue_after_s=plan.requeue_after_s,
    )


def comparable(found: Object, *, edited: bool) -> Any:
    found = json.loads(json.dumps(found))
    found["metadata"].pop("resourceVersion", None)
    if edited:
        found["metadata"].pop("generation")
        found.pop("spec")
        status = found.get("status", {})
        status.pop("observedGeneration", None)
        own = [item for item in status.get("conditions", ()) if item["type"] != REFUSED]
        status["conditions"] = [{**item, "observedGeneration": 0} for item in own]
        status.pop("acceptedSpec", None)
        (status.get("pinned") or {}).pop("generation", None)
        for made in status.get("revisions", ()):
            made.pop("generation", None)
    return found


def conditions(cluster: SimulatedCluster, key: Key, name: str) -> list[dict[str, Any]]:
    status = cluster.objects[key].get("status", {})
    return [item for item in status.get("conditions", ()) if item["type"] == name]


# TrainingJob


def edit(run: Run, patch: dict[str, Any]) -> None:
    run.cluster.change_spec(JOB, lambda spec: merge(spec, patch))


def edit_refused(run: Run) -> None:
    edit(run, UNBUILT)


def test_a_running_job_completes_and_keeps_its_last_save_though_an_edit_of_it_is_refused() -> None:
    run = Run()
    run.start()
    edit_refused(run)
    run.train(100, (run.save(100),))
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED, step=100, saves=(run.word(100),))
    run.cluster.settle()
    assert run.status["phase"] == "Completed"
    assert run.condition(run.checkpoint(100), "Verified") == "True"


def test_a_gang_that_dies_after_a_refused_edit_has_its_cause_named_and_starts_again_as_before() -> None:
    run = Run()
    run.start()
    run.train(20, (run.save(20),))
    edit_refused(run)
    for pod in run.gang:
        run.cluster.end(pod, Cause.RANK_FAILED, detail="ValueError: boom", saves=(run.word(20),))
    run.cluster.settle()
    assert run.status["lastFailure"]["cause"] == "RankFailed"
    run.next_attempt()
    assert (run.attempt, run.status["attempt"]["resumedFrom"]["step"]) == (1, 20)
    config = next(c for c in run.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith("-a1"))
    assert '"cpu_offload": true' not in config["data"]["config.json"]
    assert run.condition(run.job, "EditRefused") == "True"


@pytest.mark.parametrize(
    ("verb", "cause", "phase"),
    [("cancel", Cause.CANCELLED, "Cancelled"), ("suspend", Cause.INTERRUPTED, "Suspended")],
    ids=["cancel", "suspend"],
)
def test_a_job_with_a_refused_edit_can_be_stopped(verb: str, cause: Cause, phase: str) -> None:
    run = Run()
    run.start()
    edit_refused(run)
    edit(run, {"run": {verb: True}})
    run.cluster.reconcile(JOB)
    assert [body["mode"] for _, _, body in run.cluster.calls] == [verb]
    for pod in run.gang:
        run.cluster.end(pod, cause, saves=(run.word(30),))
    run.cluster.settle()
    assert (run.status["phase"], len(run.cluster.of_kind("Checkpoint"))) == (phase, 1)


def test_the_deadline_and_the_time_to_live_of_a_refused_edit_count() -> None:
    run = Run()
    run.start()
    edit(run, {**UNBUILT, "run": {"activeDeadlineSeconds": 100, "ttlSecondsAfterFinished": 60}})
    run.cluster.vanish(run.gang[1])
    run.cluster.kill(run.gang[0])
    run.cluster.advance(101)
    run.cluster.settle()
    text = "activeDeadlineSeconds 100 have passed since the first start"
    assert (run.status["phase"], run.status["message"]) == ("Failed", text)
    run.cluster.advance(61)
    run.cluster.reconcile(JOB)
    assert JOB not in run.cluster.objects


def test_a_refused_edit_names_the_field_and_the_value_until_it_is_taken_back() -> None:
    run = Run()
    run.start()
    edit_refused(run)
    run.cluster.settle()
    (condition,) = conditions(run.cluster, JOB, REFUSED)
    assert (condition["status"], condition["reason"]) == ("True", "NotSupported")
    assert UNBUILT_FIELD in condition["message"]
    assert run.cluster.events.count(REFUSED) == 1
    assert run.status["observedGeneration"] == run.job["metadata"]["generation"]
    assert run.condition(run.job, "Stalled") == "absent"
    edit(run, BUILT)
    run.cluster.settle()
    assert conditions(run.cluster, JOB, REFUSED) == []


def test_a_job_that_was_never_accepted_stalls_and_starts_once_it_is_right() -> None:
    run = Run(**UNBUILT)
    run.cluster.settle()
    assert (run.condition(run.job, "Stalled"), run.gang) == ("True", [])
    assert "acceptedSpec" not in run.status
    edit(run, BUILT)
    run.cluster.settle()
    assert len(run.gang) == 2


def test_a_job_that_was_never_accepted_can_be_cancelled() -> None:
    run = Run(**UNBUILT, run={"cancel": True})
    run.cluster.settle()
    assert run.status["phase"] == "Cancelled"


def test_an_edit_of_a_running_job_that_waits_for_the_next_attempt_says_so_with_both_values() -> None:
    run = Run()
    run.start()
    edit(run, {"workers": {"replicas": 4}, "logging": {"everySteps": 10}})
    run.cluster.settle()
    (condition,) = conditions(run.cluster, JOB, PENDING)
    assert (condition["status"], condition["reason"]) == ("True", "NextAttempt")
    text = "takes effect with the next attempt: spec.logging.everySteps 1 -> 10, spec.workers.replicas 2 -> 4"
    assert condition["message"] == text
    assert len(run.gang) == 2
    run.cluster.end(run.gang[0], Cause.RANK_FAILED)
    run.next_attempt()
    assert len(run.gang) == 4
    assert conditions(run.cluster, JOB, PENDING) == []


def test_an_edit_of_lists_that_waits_names_their_items_without_their_values() -> None:
    secret = [{"name": "KEY", "value": "first"}, {"name": "LEVEL", "value": "1"}]
    run = Run(workers={"replicas": 2, "env": secret, "tolerations": [{"key": "a"}]})
    run.start()
    changed = [{"name": "KEY", "value": "second"}, {"name": "MORE", "value": "1"}]
    edit(run, {"workers": {"replicas": 2, "env": changed, "tolerations": [{"key": "b"}]}})
    run.cluster.settle()
    (condition,) = conditions(run.cluster, JOB, PENDING)
    assert condition["message"] == (
        "takes effect with the next attempt: spec.workers.env[KEY] (set) -> (another value), "
        "spec.workers.env[LEVEL] (set) -> unset, spec.workers.env[MORE] unset -> (set), "
        "spec.workers.tolerations (list of 1) -> another (list of 1)"
    )
    edit(run, {"workers": {"replicas": 2, "env": secret[::-1], "tolerations": [{"key": "a"}]}})
    run.cluster.settle()
    (condition,) = conditions(run.cluster, JOB, PENDING)
    assert condition["message"] == "takes effect with the next attempt: spec.workers.env (list of 2) -> (another order)"


@pytest.mark.parametrize(
    "patch",
    [{"run": {"backoffLimit": 3}}, {"checkpoint": {"maxToKeep": 5}}, {"workers": {"replicas": 2}}],
    ids=["run", "retention", "the same"],
)
def test_an_edit_that_takes_effect_at_once_waits_for_nothing(patch: dict[str, Any]) -> None:
    run = Run()
    run.start()
    edit(run, patch)
    run.cluster.settle()
    assert conditions(run.cluster, JOB, PENDING) == []


def test_an_edit_that_waits_is_still_said_while_a_later_one_is_refused() -> None:
    run = Run()
    run.start()
    edit(run, {"workers": {"replicas": 4}})
    run.cluster.settle()
    edit_refused(run)
    run.cluster.settle()
    assert conditions(run.cluster, JOB, PENDING)
    assert conditions(run.cluster, JOB, REFUSED)
    run.cluster.end(run.gang[0], Cause.RANK_FAILED)
    run.next_attempt()
    assert len(run.gang) == 4
