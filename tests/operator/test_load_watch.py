"""The autoscaler in the loop: reports become decisions, the reconcile writes `/scale` and status, metrics show both."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.admission.admission import Admission
from stoker.operator.domain.autoscaling.decision import REVIEW_S, Decision
from stoker.operator.domain.autoscaling.record import first_record
from stoker.operator.domain.placement.node_capacity import NodeCapacity
from stoker.operator.domain.plan import Key, Object, Report
from stoker.operator.loop.load_watch import LoadWatch
from stoker.operator.loop.metrics import OperatorMetrics, OperatorState
from stoker.operator.loop.node_watch import NodeCounts
from stoker.operator.loop.store import Store, key_of
from testing.operator.engine_load import load
from testing.operator.fakes import FakeClock
from testing.operator.serving_world import CHAT, POOL, Serving, condition_of, label_of

GOALS: dict[str, Any] = {"min": 0, "max": 6, "ttftMs": 1000, "mode": "slo", "scaleDownAfterSeconds": 60}


class Watched:
    """A deployment in a store, whose engines report what the test says."""

    def __init__(
        self, autoscaling: dict[str, Any] = GOALS, nodes: tuple[NodeCapacity, ...] | None = None, **layout: Any
    ) -> None:
        pool = {"name": "main", "replicas": 1, "autoscaling": autoscaling, **layout}
        others = [{"name": "pre", "role": "prefill"}] if layout.get("role") == "decode" else []
        self.serving = Serving(pools=[pool, *others], router={"holdSeconds": 60})
        self.serving.checkpoint(10)
        self.serving.rest()
        self.store, self.clock, self.woken = Store(), FakeClock(), list[str]()
        self.watch = LoadWatch(self.store, self.clock, lambda found: self.woken.append(found["kind"]), lambda: nodes)
        self.done: dict[str, float] = {}
        self.take()

    def take(self) -> None:
        """Take the objects of the simulated cluster over."""
        for found in self.serving.cluster.objects.values():
            if found["kind"] == "Pod" and found["status"].get("conditions"):
                found["status"]["conditions"][0]["lastTransitionTime"] = "2026-01-01T00:00:40Z"
            self.store.put(found)

    def engines(self) -> list[Object]:
        """Those of the pool `main`."""
        engines = [pod for pod in self.serving.engines() if label_of(pod, "pool") == "main"]
        return [pod for pod in engines if pod["status"]["phase"] == "Running"]

    def serve(self, seconds: int, rate: float) -> None:
        """Let time pass; each engine reports its share of `rate` each 2 s, and a review comes each 5 s."""
        for number in range(seconds):
            self.clock.passed_s += 1
            for pod in self.engines():
                name = pod["metadata"]["name"]
                self.done[name] = self.done.get(name, 0.0) + rate / len(self.engines())
                if number % 2 == 0:
                    count = round(self.done[name])
                    self.watch.note(pod, {"load": load(count, count, running=1 if rate else 0)})
            if number % REVIEW_S == REVIEW_S - 1:
                self.watch.review_all()

    def answer_as_routers(self, report: Report) -> None:
        """Let the poller take this answer of each router."""
        for pod in self.serving.cluster.pods("router"):
            self.watch.note(pod, report)
            self.store.put_report(pod["metadata"]["uid"], report)

    @property
    def newest(self) -> Decision:
        return self.watch.scaling(CHAT)["main"].newest

    def follow(self) -> None:
        """Let the reconcilers act on the decisions, and the pods get ready."""
        self.serving.cluster.scaling = self.watch.scaling(CHAT)
        self.serving.rest(4)
        self.take()


def test_reports_become_decisions_that_are_written_to_scale_and_status() -> None:
    watched = Watched()
    watched.serve(30, 1.0)
    assert (watched.newest.reason, watched.newest.after) == ("Sufficient", 1)
    assert watched.newest.inputs["startupSeconds"] == "40"
    watched.serve(60, 12.0)
    assert (watched.newest.reason, watched.newest.after) == ("Load", 2)
    assert "InferenceDeployment" in watched.woken
    watched.follow()
    assert watched.serving.cluster.objects[POOL]["spec"]["replicas"] == 2
    decision = watched.serving.status["pools"][0]["decisions"][-1]
    assert (decision["before"], decision["after"], decision["reason"]) == (1, 2, "Load")
    assert float(decision["inputs"]["requestsPerSecond"]) > 2
    assert "Load" in watched.serving.cluster.events


@pytest.mark.parametrize(("role", "goal"), [("colocated", "ttftMs"), ("decode", "itlMs")])
def test_copies_over_pods_are_scaled_by_replica_and_by_the_load_of_each(role: str, goal: str) -> None:
    goals = {name: value for name, value in GOALS.items() if name != "ttftMs"} | {goal: 1000}
    alone, watched = Watched(goals, role=role), Watched(goals, role=role, podsPerReplica=2, parallelism={"data": 2})
    for one in (alone, watched):
        one.serve(60, 6.0)
    assert (alone.newest.needed, watched.newest.needed) == (4, 2), "a replica has two engines' worth of copies"
    seen = next(found for _, _, found, _ in watched.watch.inputs())
    endpoints = watched.engines()
    assert (seen.ready, seen.copies, seen.running) == (1, 2, len(endpoints))
    watched.follow()
    assert watched.serving.cluster.objects[POOL]["spec"]["replicas"] == 2
    assert len(watched.engines()) == 4

    watched.store.remove(key_of(endpoints[1]), endpoints[1]["metadata"]["uid"])
    watched.watch.review_all()
    seen = next(found for _, _, found, _ in watched.watch.inputs())
    assert seen.ready == 1, "a replica that lacks an endpoint is not ready"


def decode_loads(computed: int) -> Iterator[dict[str, Any]]:
    """Loads of an engine that answers ten requests per second, each 2 s; steps and prompts vary."""
    chance, steps, prompts = random.Random(0), 0, 0
    for ended in range(0, 600, 20):
        steps, prompts = steps + chance.randint(50, 150), prompts + chance.randint(0, 40) * computed
        busy_s = steps * 0.01 + prompts * 5e-5 + 49 * ended * 2e-4
        yield load(ended, ended, computed, steps=steps, step_tokens=prompts + 49 * ended, busy_s=busy_s)


def test_a_decode_pool_is_sized_for_the_prompts_that_it_computes_itself() -> None:
    """A router splits a request only where that is cheaper, so short prompts stay, and those of a full prefill pool."""
    goals = {**GOALS, "itlMs": 100}
    del goals["ttftMs"]
    needs = []
    for computed in (1, 1600):
        watched = Watched(goals, role="decode")
        for found in decode_loads(computed):
            watched.clock.passed_s += 2
            watched.watch.note(watched.engines()[0], {"load": found})
            watched.watch.review_all()
        assert float(watched.newest.inputs["promptTokens"]) == pytest.approx(computed, rel=0.06)
        needs.append(watched.newest.needed or 0)
    assert needs[0] == 1 < needs[1]


def test_what_routers_keep_back_is_load_that_no_engine_has_seen() -> None:
    watched = Watched()
    watched.serve(60, 1.0)
    assert (watched.newest.reason, watched.newest.inputs["waiting"]) == ("Sufficient", "0")
    pods = watched.store.of_kind("Pod")
    router = next(pod for pod in pods if label_of(pod, "role") == "router")
    for refused in range(0, 400, 50):
        watched.watch.note(router, {"program": "router", "goals": {"waiting": 40, "late": 0, "refused": refused}})
        watched.serve(5, 1.0)
    assert watched.newest.inputs["waiting"] == "40"
    assert float(watched.newest.inputs["requestsPerSecond"]) == pytest.approx(11, abs=3)
    assert float(watched.newest.inputs["lateShare"]) > 0.5
    watched.store.remove(key_of(router), router["metadata"]["uid"])
    watched.serve(5, 1.0)
    assert watched.newest.inputs["waiting"] == "0", "with the router its requests are gone"


def test_silent_engines_hold_the_pool_and_the_condition_says_so() -> None:
    watched = Watched()
    watched.serve(30, 1.0)
    for _ in range(4):
        watched.clock.passed_s += REVIEW_S
        watched.watch.review_all()
    assert watched.newest.reason == "Unknown"
    assert "the load of engine chat-main-" in watched.newest.message
    watched.follow()
    found = condition_of(watched.serving.status, "AutoscalingLimited")
    assert (found["status"], found["reason"]) == ("True", "Unknown")
    watched.serve(20, 1.0)
    watched.follow()
    assert watched.serving.condition("AutoscalingLimited") == "absent"


def test_an_idle_pool_goes_to_zero_and_wakes_when_a_router_holds_requests() -> None:
    watched = Watched()
    watched.serve(120, 0.0)
    assert (watched.newest.before, watched.newest.after, watched.newest.reason) == (1, 0, "Idle")
    watched.follow()
    assert watched.serving.status["phase"] == "ScaledToZero"
    watched.watch.review_all()
    assert watched.newest.after == 0
    watched.answer_as_routers({"held": 2})
    watched.watch.review_all()
    assert (watched.newest.after, watched.newest.reason) == (1, "Wake")
    watched.follow()
    assert watched.serving.status["phase"] == "Serving"


def test_what_a_router_held_wakes_no_pool_once_it_has_fallen_silent() -> None:
    watched = Watched()
    watched.answer_as_routers({"held": 2})
    watched.serve(30, 0.0)
    assert watched.newest.inputs["held"] == "0", "the answer is too old"
    watched.serve(90, 0.0)
    assert (watched.newest.before, watched.newest.after, watched.newest.reason) == (1, 0, "Idle")
    watched.follow()
    watched.serve(60, 0.0)
    assert (watched.newest.before, watched.newest.after, watched.newest.reason) == (0, 0, "Unknown")
    assert re.search(r"router chat-\S+ has not answered for \d+ s", watched.newest.message)
    watched.answer_as_routers({"held": 0})
    watched.watch.review_all()
    assert "router" not in watched.newest.message


def test_a_pool_waits_for_room_on_the_nodes() -> None:
    full = NodeCapacity(name="n", free={"cpu": 0, "memory": 0, "pods": 0})
    watched = Watched({**GOALS, "min": 1}, (full,))
    watched.serve(60, 40.0)
    assert (watched.newest.before, watched.newest.after) == (1, 2), "the one that waits is for a node autoscaler"
    watched.follow()
    watched.serve(60, 40.0)
    assert watched.newest.reason == "WaitingForRoom"
    watched.follow()
    assert "WaitingForGPUs" in condition_of(watched.serving.status, "AutoscalingLimited")["message"]


def test_a_pool_whose_replica_waits_for_a_node_asks_for_no_other_one() -> None:
    full = NodeCapacity(name="n", free={"cpu": 0, "memory": 0, "pods": 0})
    watched = Watched({**GOALS, "min": 1}, (full,))
    watched.serve(60, 40.0)
    watched.follow()
    *_, pending = watched.engines()
    version = str(int(pending["metadata"]["resourceVersion"]) + 1000)
    spec = {name: value for name, value in pending["spec"].items() if name != "nodeName"}
    metadata = {**pending["metadata"], "resourceVersion": version}
    watched.store.put({**pending, "metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
    watched.watch.review_all()
    assert (watched.newest.before, watched.newest.after) == (2, 2)
    assert (watched.newest.reason, watched.newest.inputs["placeable"]) == ("WaitingForRoom", "1")


def test_only_pools_that_stoker_scales_are_reviewed() -> None:
    watched = Watched({"min": 1, "max": 4, "mode": "external"})
    watched.serve(30, 5.0)
    assert watched.watch.scaling(CHAT) == {}
    watched = Watched({"min": 1, "max": 4, "mode": "load"})
    watched.serve(30, 5.0)
    assert watched.newest.reason == "Sufficient"
    watched.serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].pop("autoscaling"))
    watched.follow()
    watched.watch.review_all()
    assert watched.watch.scaling(CHAT) == {}
    assert not watched.serving.status["pools"][0].get("decisions")


def test_metrics_show_what_was_seen_and_decided() -> None:
    watched = Watched({**GOALS, "min": 1, "max": 1})
    watched.serve(60, 40.0)
    metrics = OperatorMetrics()
    metrics.watch(
        lambda: OperatorState(
            queue=0, delayed=0, polls=0, objects={}, silence_s={}, nodes=NodeCounts(0, 0, 0),
            pools=tuple(watched.watch.inputs()),
        )
    )  # fmt: skip
    labels = {"namespace": "default", "deployment": "chat", "pool": "main"}

    def value(name: str, **more: str) -> float | None:
        return metrics.registry.get_sample_value(f"stoker_operator_pool_{name}", {**labels, **more})

    assert value("replicas") == 1
    needed = value("needed_replicas")
    assert needed is not None
    assert needed > 1
    assert value("scaling_blocked", reason="AtMax") == 1
    assert value("startup_seconds") == 40


def test_a_decision_about_another_number_of_replicas_is_an_old_one() -> None:
    serving = Serving(pools=[{"name": "main", "replicas": 1, "autoscaling": GOALS}], router={"holdSeconds": 60})
    serving.checkpoint(10)
    serving.rest()
    serving.cluster.change_spec(POOL, lambda spec: spec.update(replicas=4))
    old = Decision(0.0, 1, 2, "Load", "2 needed")
    serving.cluster.scaling = {"main": first_record(old, "2026-01-01T00:00:00Z")}
    serving.rest()
    assert serving.cluster.objects[POOL]["spec"]["replicas"] == 4


def test_decisions_from_before_a_restart_stay_in_the_status() -> None:
    serving = Serving(pools=[{"name": "main", "replicas": 1, "autoscaling": GOALS}], router={"holdSeconds": 60})
    serving.checkpoint(10)
    serving.rest()
    for number in range(25):
        before, after = (1, 2) if number % 2 == 0 else (2, 1)
        record = first_record(Decision(0.0, before, after, "Load", "m"), f"2026-01-01T00:{number:02}:00Z")
        serving.cluster.scaling = {"main": record}
        serving.cluster.settle_once()
    times = [found["time"] for found in serving.status["pools"][0]["decisions"]]
    assert times == [f"2026-01-01T00:{number:02}:00Z" for number in range(5, 25)]


def test_a_pool_that_stoker_may_scale_to_zero_needs_routers_that_hold() -> None:
    admission = Admission.from_folder(Path(__file__).parents[2] / "crds")

    def causes(router: dict[str, Any], **autoscaling: Any) -> list[str]:
        spec = {
            "model": {"uri": "pvc://models/a"},
            "pools": [{"name": "main", "replicas": 1, "autoscaling": {**GOALS, **autoscaling}}],
            "router": router,
        }
        body = {"apiVersion": "stoker.dev/v1alpha1", "kind": CHAT.kind, "metadata": {"name": "chat"}, "spec": spec}
        try:
            admission.admit(body)
        except Exception as refused:  # noqa: BLE001 - the text is what is compared
            return [str(refused)]
        return []

    (refusal,) = causes({})
    assert "spec.router.holdSeconds" in refusal
    assert "autoscaling.min 0" in refusal
    assert causes({"holdSeconds": 60}) == []
    assert causes({}, min=1) == []


def test_a_key_of_another_deployment_has_no_decisions() -> None:
    watch = LoadWatch(Store(), FakeClock(), lambda _: None, lambda: None)
    assert watch.scaling(Key("InferenceDeployment", "default", "other")) == {}
