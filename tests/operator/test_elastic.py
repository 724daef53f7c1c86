"""Elastic runs: the sizes that a run can have, when it changes, and what a change does to it."""

from __future__ import annotations

from copy import deepcopy
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.elastic import (
    Limits,
    Moment,
    Pace,
    divides,
    due_in_s,
    may_grow,
    resized,
    with_form,
)
from stoker.operator.domain.goodput import read_ledger, totals
from stoker.operator.domain.job_plan import GPU_PRODUCT, too_large
from stoker.operator.domain.placement.node_capacity import pinned_node
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.pods import is_gated
from stoker.operator.domain.settings import Settings
from stoker.operator.domain.unsupported import unsupported
from stoker.pod.causes import Cause
from testing.operator.ready_node import ready_node
from testing.operator.simulated_cluster import START
from testing.operator.training_world import JOB, Run

PACE = Pace()


def at(**changes: Any) -> Moment:
    long_ago = START - timedelta(days=1)
    return Moment(**{"now": START, "workers": 2, "runs": False, "since": long_ago, **changes})


def spec_of(**sections: Any) -> dict[str, Any]:
    return {"workers": {"replicas": 4}, "training": {"globalBatchSize": 24}, **sections}


# When


@given(
    runs=st.booleans(),
    since=st.integers(0, 2000),
    changed=st.one_of(st.none(), st.integers(0, 2000)),
    room=st.integers(0, 8),
    workers=st.integers(1, 8),
    patience=st.sampled_from([0, 60, 300]),
    rest=st.sampled_from([0, 30, 600]),
)
def test_a_size_changes_only_when_it_is_due_and_only_to_one_with_room(
    runs: bool, since: int, changed: int | None, room: int, workers: int, patience: int, rest: int
) -> None:
    before = None if changed is None else START - timedelta(seconds=changed)
    moment = at(runs=runs, workers=workers, since=START - timedelta(seconds=since), changed=before)
    limits = Limits(smallest=1, largest=8, pace=Pace(patience_s=patience, rest_s=rest))
    form = resized(spec_of(), limits, moment, lambda spec: spec["workers"]["replicas"] <= room)
    if changed is not None and changed < rest:
        assert form is None, "never more than one change in this time"
    if not runs and since < patience:
        assert form is None, "a gang that waits only just may still find room"
    sizes = [size for size in (1, 2, 3, 4, 6, 8) if size <= room]
    allowed = [size for size in sizes if size > workers or not runs]
    if due_in_s(moment, limits.pace) > 0 or not allowed or max(allowed) == workers:
        assert form is None
    else:
        assert form == {"workers": {"replicas": max(allowed)}}


@given(
    replicas=st.integers(1, 12),
    ranks=st.integers(1, 4),
    tensor=st.sampled_from([1, 2, 4]),
    replicate=st.sampled_from([1, 2]),
    expert=st.sampled_from([1, 2]),
    batch=st.integers(1, 48),
    micro=st.integers(1, 3),
    deterministic=st.sampled_from(["Off", "AnyDataParallel"]),
)
def test_what_divides_is_what_admission_takes(
    replicas: int, ranks: int, tensor: int, replicate: int, expert: int, batch: int, micro: int, deterministic: str
) -> None:
    spec = {
        "workers": {"replicas": replicas, "ranksPerPod": ranks},
        "parallelism": {"tensor": tensor, "replicate": replicate, "expert": expert},
        "training": {"globalBatchSize": batch, "microBatchSize": micro, "deterministic": deterministic},
    }
    world = replicas * ranks
    data = world // tensor
    expected = (
        world % tensor == 0
        and data >= 1
        and data % replicate == 0
        and (world * 1) % (tensor * replicate) == 0
        and (world * tensor) % (tensor * replicate * expert) == 0
        and batch % (micro * data) == 0
        and (deterministic == "Off" or (2**32) % data == 0)
    )
    assert divides(spec) == expected


def test_another_layout_is_taken_where_the_present_one_does_not_divide_the_size() -> None:
    model = {
        "architecture": "llama",
        "hiddenSize": 512,
        "intermediateSize": 1024,
        "numLayers": 4,
        "numHeads": 8,
        "vocabSize": 1024,
    }
    spec = spec_of(
        model=model,
        workers={"replicas": 4, "gpusPerPod": 2, "nodeSelector": {GPU_PRODUCT: "NVIDIA-H100-80GB-HBM3"}},
        parallelism={"tensor": 2, "pipeline": 4},
    )
    form = resized(spec, Limits(smallest=1, largest=4), at(workers=4), lambda found: found["workers"]["replicas"] <= 3)
    assert form is not None
    assert form["workers"] == {"replicas": 3}
    chosen = with_form(spec, form)
    assert divides(chosen)
    assert not too_large(chosen)
    assert chosen["training"] == spec["training"]
    assert not unsupported("TrainingJob", chosen)
    unknown = {**spec, "workers": {"replicas": 4, "gpusPerPod": 2}}
    limits = Limits(smallest=1, largest=4)
    again = resized(deepcopy(spec), limits, at(workers=4), lambda found: found["workers"]["replicas"] <= 3)
    assert again is not None
    assert again["parallelism"] is form["parallelism"], "what takes seconds for a large cluster is not done twice"
    assert resized(unknown, limits, at(workers=4), lambda found: found["workers"]["replicas"] <= 3) is None


def test_another_layout_is_one_that_the_trainer_runs() -> None:
    model = {
        "architecture": "llama",
        "hiddenSize": 512,
        "intermediateSize": 1024,
        "numLayers": 1,
        "numHeads": 8,
        "numKvHeads": 1,
        "vocabSize": 1024,
    }
    spec = spec_of(
        model=model,
        workers={"replicas": 4, "gpusPerPod": 2, "nodeSelector": {GPU_PRODUCT: "NVIDIA-H100-80GB-HBM3"}},
        training={"globalBatchSize": 4, "sequenceLength": 6144},
        runtime={"attention": "flash"},
    )
    limits = Limits(smallest=1, largest=4)
    form = resized(spec, limits, at(workers=4), lambda found: found["workers"]["replicas"] == 3)
    assert form is None, "six ranks share sequences, which flash-attn-4 does not do with AllGather"
    either = {name: section for name, section in spec.items() if name != "runtime"}
    assert resized(either, limits, at(workers=4), lambda found: found["workers"]["replicas"] == 3) is not None


# What


def world(*nodes: str, places: bool = True, **run: Any) -> Run:
    found = Run(
        Settings(places_gangs=places),
        workers={"replicas": 2, "gpusPerPod": 1},
        training={"totalSteps": 100, "globalBatchSize": 8},
        scheduling={"gangTimeoutSeconds": 86400},
        run={"elastic": {"minWorkers": 1, "maxWorkers": 4}, "backoffLimit": 20, **run},
    )
    for name in nodes:
        found.cluster.add(ready_node(name, 1))
    return found


def go_on(run: Run, seconds: float, rounds: int = 8) -> None:
    """Let time pass while pods end and tasks answer."""
    for _ in range(rounds):
        run.cluster.settle()
        run.cluster.collect()
        run.answer_tasks("list", saves=[])
        run.cluster.advance(seconds / rounds)
    run.cluster.settle()


def sizes(run: Run) -> tuple[int, list[str | None]]:
    return len(run.gang), sorted((pinned_node(pod) for pod in run.gang), key=str)


def test_a_lost_node_makes_the_run_smaller_and_its_return_larger_without_a_failure() -> None:
    run = world("n0", "n1")
    run.start()
    run.train(30, (run.save(30),))
    run.cluster.objects.pop(Key("Node", "", "n1"))
    lost = next(pod for pod in run.gang if pinned_node(pod) == "n1")
    run.cluster.end(lost, Cause.INTERRUPTED, saves=(run.word(30),))
    go_on(run, PACE.patience_s - 20)
    assert sizes(run) == (2, [None, None]), "it waits a while for the node"
    go_on(run, 120)
    assert sizes(run) == (1, ["n0"])
    assert run.status["attempt"]["resumedFrom"]["step"] == 30
    assert run.status["elastic"]["workers"] == 1
    assert (run.status["worldSize"], run.status["dataParallel"]) == (1, 1)
    assert "Resized" in run.cluster.events
    run.cluster.run(run.gang[0])
    run.train(40)
    run.cluster.add(ready_node("n1", 1))
    go_on(run, PACE.rest_s / 2)
    assert (run.cluster.calls, len(run.gang)) == ([], 1), "not twice in ten minutes"
    run.cluster.advance(PACE.rest_s)
    run.cluster.reconcile(JOB)
    run.cluster.reconcile(JOB)
    assert [body["mode"] for _, path, body in run.cluster.calls if path == "/drain"] == ["suspend"]
    run.cluster.end(run.gang[0], Cause.INTERRUPTED, step=44, saves=(run.word(44),))
    go_on(run, 30)
    assert sizes(run) == (2, ["n0", "n1"])
    assert run.status["attempt"]["resumedFrom"]["step"] == 44
    assert run.status["elastic"]["workers"] == 2
    assert run.status.get("failuresWithoutProgress", 0) == 0
    assert run.status.get("lostSteps", 0) == 0


def test_it_grows_beyond_its_replicas_where_there_is_room_and_keeps_the_batch() -> None:
    run = world("n0", "n1", "n2", "n3")
    run.start()
    assert sizes(run)[0] == 2
    assert may_grow(run.job)
    run.cluster.advance(PACE.rest_s + 1)
    run.cluster.reconcile(JOB)
    run.cluster.reconcile(JOB)
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, saves=(run.word(10),))
    go_on(run, 30)
    assert sizes(run) == (4, ["n0", "n1", "n2", "n3"]), "3 workers do not divide the batch of 8"
    config = run.status["pinned"]["rendered"]["config"]
    assert (config["gang"]["nodes"], config["training"]["global_batch_size"]) == (4, 8)
    assert "EditPending" not in {found["type"] for found in run.status["conditions"]}
    assert not may_grow(run.job)


@pytest.mark.parametrize("begins_with", [2, 4])
def test_a_quota_below_the_room_leaves_the_run_at_the_size_that_it_admits(begins_with: int) -> None:
    run = world("n0", "n1", "n2", "n3")
    run.cluster.pod_quota = 3
    run.cluster.change_spec(JOB, lambda spec: spec["workers"].update(replicas=begins_with))
    running = []
    for _ in range(90):
        run.cluster.settle_once()
        run.cluster.collect()
        start_or_stop(run)
        run.cluster.advance(60)
        running.append(sum(pod["status"]["phase"] == "Running" for pod in run.gang))
    assert running[-60:] == [2] * 60
    assert run.status["elastic"]["workers"] == 2
    assert run.status.get("failuresWithoutProgress", 0) == 0


def start_or_stop(run: Run) -> None:
    """Run the pods that have a node, or end them where their leader is asked to drain."""
    asked = {name for name, path, _ in run.cluster.calls if path == "/drain"}
    for pod in run.gang if "attempt" in run.status else ():
        if asked & {other["metadata"]["name"] for other in run.gang}:
            run.cluster.end(pod, Cause.INTERRUPTED)
        elif not (is_gated(pod) or pod["metadata"].get("deletionTimestamp")):
            run.cluster.run(pod)


def test_an_edit_of_the_size_ends_the_elastic_one() -> None:
    run = world("n0", applyChanges="Restart")
    run.cluster.settle()
    go_on(run, 2 * PACE.patience_s)
    assert sizes(run) == (1, ["n0"])
    for name in ("n1", "n2", "n3"):
        run.cluster.add(ready_node(name, 1))
    run.cluster.change_spec(JOB, lambda spec: spec["workers"].update(replicas=4))
    go_on(run, 30)
    assert sizes(run)[0] == 4


def attempt_of_the_written_size() -> Run:
    """A run that got smaller, and without `run.elastic` began an attempt with its two workers again."""
    run = world("n0")
    run.cluster.settle()
    go_on(run, 2 * PACE.patience_s)
    run.cluster.run(run.gang[0])
    run.train(10, (run.save(10),))
    run.cluster.change_spec(JOB, lambda spec: spec["run"].pop("elastic"))
    run.cluster.add(ready_node("n1", 1))
    run.cluster.end(run.gang[0], Cause.INTERRUPTED, saves=(run.word(10),))
    go_on(run, 60)
    for pod in run.gang:
        run.cluster.run(pod)
    run.train(20, (run.save(20),))
    assert sizes(run) == (2, ["n0", "n1"])
    return run


def test_a_size_that_was_given_up_restarts_no_run_when_its_placement_is_edited() -> None:
    run = attempt_of_the_written_size()
    topology = [{"key": "zone", "mode": "Preferred"}]
    run.cluster.change_spec(JOB, lambda spec: spec["scheduling"].update(topology=topology))
    run.cluster.reconcile(JOB)
    run.cluster.reconcile(JOB)
    assert run.cluster.calls == []
    pending = next(found for found in run.status["conditions"] if found["type"] == "EditPending")
    assert pending["message"].startswith("takes effect with the next attempt:")


def test_a_size_that_was_given_up_does_not_come_back_with_the_limits() -> None:
    run = attempt_of_the_written_size()
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(elastic={"minWorkers": 1, "maxWorkers": 2}))
    run.cluster.advance(PACE.rest_s + 1)
    run.cluster.reconcile(JOB)
    run.cluster.reconcile(JOB)
    assert (run.cluster.calls, run.status["phase"]) == ([], "Running")


def test_limits_that_are_put_back_before_the_next_attempt_leave_the_size_as_it_is() -> None:
    run = world("n0", applyChanges="NextAttempt")
    run.cluster.settle()
    go_on(run, 2 * PACE.patience_s)
    run.cluster.run(run.gang[0])
    run.train(10, (run.save(10),))
    elastic = run.job["spec"]["run"]["elastic"]
    run.cluster.change_spec(JOB, lambda spec: spec["run"].pop("elastic"))
    run.cluster.settle()
    assert run.condition(run.job, "EditPending") == "True"
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(elastic=elastic))
    run.cluster.settle()
    assert (run.condition(run.job, "EditPending"), run.cluster.calls) == ("absent", [])


def test_a_run_that_the_operator_does_not_place_says_that_its_size_is_fixed() -> None:
    run = world(places=False)
    run.start()
    condition = next(found for found in run.status["conditions"] if found["type"] == "ElasticLimited")
    assert condition["message"] == "run.elastic has no effect: the operator has no view of nodes"
    plain = Run(Settings(places_gangs=True))
    plain.cluster.settle()
    assert "ElasticLimited" not in {found["type"] for found in plain.status["conditions"]}


def blame(run: Run, node: str) -> None:
    """Write a history in which two attempts hung on a node."""
    failure = {"cause": "Hang", "action": "Retry", "node": node}
    run.job["status"]["attempts"] = [{"number": number, "failure": failure} for number in (90, 91)]
    run.cluster._touch(run.job)


def test_it_never_grows_onto_a_node_that_it_avoids() -> None:
    run = world("n0", "n1", "n2", "n3")
    run.start()
    spare = sorted({"n0", "n1", "n2", "n3"} - {str(pinned_node(pod)) for pod in run.gang})
    blame(run, spare[0])
    run.cluster.advance(PACE.rest_s + 1)
    run.cluster.settle()
    assert run.status["avoidedNodes"] == [spare[0]]
    assert (run.cluster.calls, run.status.get("elastic")) == ([], None), "four workers would need that node"
    run.cluster.add(ready_node("n4", 1))
    run.cluster.reconcile(JOB)
    assert run.status["elastic"]["workers"] == 4


def test_a_gang_without_room_takes_the_size_that_needs_no_avoided_node() -> None:
    run = world("n0")
    run.cluster.settle()
    blame(run, "bad")
    run.cluster.objects.pop(Key("Node", "", "n0"))
    run.cluster.add(ready_node("bad", 1))
    go_on(run, 2 * PACE.patience_s)
    assert sizes(run) == (1, ["bad"]), "better there than nowhere"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["node", "lose", "run", "end", "wait"]), st.integers(0, 5)), max_size=20))
def test_any_order_of_nodes_and_ends_keeps_the_limits_and_the_time_between_changes(
    events: list[tuple[str, int]],
) -> None:
    run = world("n0", "n1")
    run.start()
    changes: list[str] = []
    for event, number in events:
        if event == "node":
            run.cluster.add(ready_node(f"n{number}", 1))
        elif event == "lose":
            run.cluster.objects.pop(Key("Node", "", f"n{number}"), None)
        elif event == "run":
            for pod in run.gang:
                if pinned_node(pod):
                    run.cluster.run(pod)
        elif event == "end":
            for pod in run.gang[number:]:
                if pod["status"]["phase"] == "Running":
                    run.cluster.end(pod, Cause.INTERRUPTED)
        elif event == "wait":
            run.cluster.advance(60 * number)
        for _ in range(3):
            run.cluster.reconcile(JOB)
        run.cluster.collect()
        for pod in run.cluster.pods("task"):
            if pod["status"]["phase"] == "Pending":
                run.cluster.end(pod, Cause.COMPLETED, result={"task": "list", "ok": True, "saves": []})
        live = [pod for pod in run.cluster.pods("trainer") if pod["status"]["phase"] in {"Pending", "Running"}]
        assert len({pod["metadata"]["labels"]["stoker.dev/attempt"] for pod in live}) <= 1
        size = run.status.get("elastic")
        if size and (not changes or size["changedAt"] != changes[-1]):
            changes.append(size["changedAt"])
        assert 1 <= len(run.gang) <= 4 or not run.gang
    moments = [datetime.fromisoformat(text).timestamp() for text in changes]
    assert all(late - early >= PACE.rest_s for early, late in pairwise(moments))


@pytest.mark.parametrize(
    ("elastic", "finished", "expected"), [(None, False, False), (4, True, False), (2, False, False), (4, False, True)]
)
def test_only_a_live_run_below_its_limit_may_grow(elastic: int | None, finished: bool, expected: bool) -> None:
    status: Object = {"pinned": {"rendered": {"config": {"gang": {"nodes": 2}}}}}
    if finished:
        status["finishedAt"] = "2026-01-01T00:00:00Z"
    run = {"elastic": {"minWorkers": 1, "maxWorkers": elastic}} if elastic else {}
    job: Object = {"spec": {"run": run}, "status": status}
    assert may_grow(job) is expected


# What it is worth


class Training:
    """A run that makes one step for each worker and second, and saves every 3000 s and when it is asked to go."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.steps = 0
        self._saved_at = 0.0
        self._saves: tuple[dict[str, Any], ...] = ()

    def advance(self, seconds: int, tick_s: int = 240) -> None:
        """Let time pass: pods start, train, save and end when they are drained."""
        for _ in range(seconds // tick_s):
            self._settle()
            if self._running:
                self.steps += len(self.run.gang) * tick_s
                self._report()
            self.run.cluster.advance(tick_s)

    def lose(self, node: str) -> None:
        """Take a node away with its pods, after the grace period in which they save."""
        self.run.cluster.objects.pop(Key("Node", "", node))
        self._end([pod for pod in self.run.gang if pinned_node(pod) == node])
        self._settle()

    @property
    def _running(self) -> bool:
        return bool(self.run.gang) and all(pod["status"]["phase"] == "Running" for pod in self.run.gang)

    def _report(self) -> None:
        if (now := self.run.cluster.now.timestamp()) - self._saved_at >= 3000:
            self._saved_at = now
            self._saves = (self.run.save(self.steps),)
        body = {"attempt": self.run.attempt, "phase": "Training", "step": self.steps, "total_steps": 10**9}
        self.run.cluster.report(self.run.gang[0], {**body, "saves": list(self._saves)})

    def _settle(self) -> None:
        """What operator, kubelet, agents and task pods do until nothing is left to do."""
        cluster = self.run.cluster
        version = -1
        while version != cluster.version:
            version = cluster.version
            cluster.settle_once()
            self._leave()
            cluster.collect()
            for pod in (*self.run.gang, *cluster.pods("task")):
                if pod["status"]["phase"] == "Pending" and (pinned_node(pod) or pod not in self.run.gang):
                    cluster.run(pod)
            for pod in cluster.pods("task"):
                if pod["status"]["phase"] == "Running":
                    cluster.end(pod, Cause.COMPLETED, result={"task": "list", "ok": True, "saves": []})

    def _leave(self) -> None:
        """Save and end, where that was asked for."""
        if any(path == "/drain" for _, path, _ in self.run.cluster.calls):
            self.run.cluster.calls.clear()
            self._end(self.run.gang)

    def _end(self, pods: list[Object]) -> None:
        for pod in pods:
            self.run.cluster.end(pod, Cause.INTERRUPTED, step=self.steps, saves=(self.run.word(self.steps),))


def steps_over_a_lost_node(*, elastic: bool, lost_s: int, after_s: int) -> tuple[int, dict[str, int]]:
    """Steps and ledger of a run of two nodes, of which one is away for a while."""
    limits = {"minWorkers": 1, "maxWorkers": 2} if elastic else None
    run = world("n0", "n1", elastic=limits)
    training = Training(run)
    training.advance(960)
    training.lose("n1")
    training.advance(lost_s)
    run.cluster.add(ready_node("n1", 1))
    training.advance(after_s)
    found = run.status["goodput"]
    age = int((run.cluster.now - START).total_seconds())
    return training.steps, {**totals(read_ledger(found), run.cluster.now), "age": age}


def test_an_elastic_run_trains_on_where_another_waits_for_the_node() -> None:
    lost_s = 3600
    elastic, spent = steps_over_a_lost_node(elastic=True, lost_s=lost_s, after_s=3600)
    waiting, waited = steps_over_a_lost_node(elastic=False, lost_s=lost_s, after_s=3600)
    for ledger in (spent, waited):
        assert sum(seconds for state, seconds in ledger.items() if state != "age") == ledger["age"]
    assert elastic > 1.3 * waiting
    assert spent["productive"] > waited["productive"] + 0.8 * lost_s
    assert waited["queued"] + waited["restarting"] > 0.8 * lost_s


@pytest.mark.parametrize("moment", ["asked", "saving", "ended", "gated"])
def test_a_job_that_is_deleted_while_its_size_changes_leaves_nothing_but_its_saves(moment: str) -> None:
    run = world("n0", "n1", "n2", "n3")
    run.start()
    run.train(30, (run.save(30),))
    run.cluster.advance(PACE.rest_s + 1)
    run.cluster.reconcile(JOB)
    assert "Resized" in run.cluster.events
    if moment != "asked":
        run.cluster.reconcile(JOB)
        assert run.status["phase"] == "Restarting"
    if moment in ("ended", "gated"):
        for pod in run.gang:
            run.cluster.end(pod, Cause.INTERRUPTED, saves=(run.word(30),))
    if moment == "gated":
        run.cluster.settle_once()
        run.cluster.collect()
        run.answer_tasks("list", saves=[])
        for _ in range(3):
            run.cluster.reconcile(JOB)
        assert (len(run.gang), run.attempt) == (4, 1)
    run.cluster.delete(JOB)
    for _ in range(4):
        run.cluster.settle()
        run.cluster.collect()
    assert [key.kind for key in run.cluster.objects if key.kind in ("TrainingJob", "Pod")] == []
    assert run.checkpoint(30)["status"]["phase"] == "Complete"
    assert all(run.cluster.plan(key).empty for key in run.cluster.objects if key.kind == "Checkpoint")


def test_a_job_with_a_finalizer_that_is_deleted_while_its_size_changes_makes_no_pod_any_more() -> None:
    run = world("n0", "n1", "n2", "n3")
    run.start()
    run.cluster.advance(PACE.rest_s + 1)
    run.cluster.reconcile(JOB)
    run.job["metadata"]["finalizers"] = ["other/one"]
    run.cluster.delete(JOB)
    for _ in range(4):
        run.cluster.settle()
        run.cluster.collect()
    assert run.gang == []
    assert run.cluster.plan(JOB).empty
