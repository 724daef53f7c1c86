"""A simulated cluster with one InferenceDeployment and a well-behaved environment, for tests of the serving kinds."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import strategies as st

from stoker.operator.domain.plan import Key, Object
from stoker.operator.loop.store import key_of
from stoker.operator.reconcile.enginepool.reconcile import reconcile_enginepool
from stoker.operator.reconcile.inferencedeployment.reconcile import reconcile_inferencedeployment
from testing.operator.simulated_cluster import Crash, SimulatedCluster

CHAT = Key("InferenceDeployment", "default", "chat")
POOL = Key("EnginePool", "default", "chat-main")


class Serving:
    """A cluster with one deployment, and an environment that behaves."""

    def __init__(self, *, model: dict[str, Any] | None = None, replicas: int = 1, **spec: Any) -> None:
        reconcilers = {"InferenceDeployment": reconcile_inferencedeployment, "EnginePool": reconcile_enginepool}
        self.cluster = SimulatedCluster(reconcilers)
        self.cluster.add(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "claim"}, "spec": {}}
        )
        body = {
            "model": model or {"checkpointSelector": {"jobRef": {"name": "run"}}},
            "pools": [{"name": "main", "replicas": replicas}],
            **spec,
        }
        self.cluster.add(
            {
                "apiVersion": "stoker.dev/v1alpha1",
                "kind": "InferenceDeployment",
                "metadata": {"name": "chat"},
                "spec": body,
            }
        )

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.cluster.objects[CHAT].get("status", {}))

    @property
    def pool_status(self) -> dict[str, Any]:
        return dict(self.cluster.objects[POOL].get("status", {}))

    def checkpoint(self, step: int, *, verified: bool = True, **status: Any) -> Object:
        conditions = [
            {"type": "Verified", "status": "True", "reason": "ByAgent", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        ]
        made = self.cluster.add(
            {
                "apiVersion": "stoker.dev/v1alpha1",
                "kind": "Checkpoint",
                "metadata": {"name": f"run-{step}", "labels": {"stoker.dev/job": "run", "stoker.dev/job-uid": "u"}},
                "spec": {"source": {"jobRef": {"name": "run"}}},
            }
        )
        made["status"] = {
            "phase": "Complete",
            "storage": {"claimName": "claim", "path": "run"},
            "folder": f"step-{step:08d}.00000000",
            "step": step,
            "digest": f"d{step}",
            "conditions": conditions if verified else [],
            **status,
        }
        self.cluster._touch(made)
        return made

    def engines(self, revision: str | None = None) -> list[Object]:
        found = self.cluster.pods("engine")
        return [p for p in found if revision in (None, p["metadata"]["labels"]["stoker.dev/revision"])]

    def live(self) -> None:
        """Run one well-behaved round: pods get ready, routers take snapshots, engines drain, deleted pods end."""
        cluster = self.cluster
        for pod in [*cluster.pods("engine"), *cluster.pods("router")]:
            if not pod["spec"].get("schedulingGates"):  # also one that is being deleted
                cluster.run(pod)
        self.take_snapshots()
        self.drain_engines()
        cluster.collect()

    def take_snapshots(self, *, healthy: bool = True) -> None:
        """Let routers take their snapshots and report every backend as probed."""
        found = [c for c in self.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith("-backends")]
        stored = {label_of(one, "deployment"): one for one in found}
        for pod in self.cluster.pods("router"):
            mine = stored.get(label_of(pod, "deployment"))
            if mine is not None and pod["status"]["phase"] == "Running":
                snapshot = json.loads(mine["data"]["backends.json"])
                backends = [{**backend, "healthy": healthy} for backend in snapshot["backends"]]
                ready = sum(backend["healthy"] and not backend["draining"] for backend in backends)
                report = {"snapshot_version": snapshot["version"], "ready_backends": ready, "backends": backends}
                self.cluster.report(pod, report)

    def drain_engines(self) -> None:
        asked = {name for name, path, _ in self.cluster.calls if path == "/drain"}
        for pod in self.engines():
            phase = (
                "Drained"
                if pod["metadata"]["name"] in asked and "stoker.dev/draining" in pod["metadata"]["labels"]
                else "Serving"
            )
            self.cluster.report(pod, {"phase": phase})

    def begin_drain(self) -> None:
        """Serve, then want one replica of two: an engine is asked to drain, and has not ended."""
        self.checkpoint(10)
        self.rest()
        self.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=1))
        for _ in range(3):
            self.cluster.settle_once()
        assert any("stoker.dev/draining" in pod["metadata"]["labels"] for pod in self.engines())

    def rest(self, rounds: int = 30) -> None:
        """Run rounds until nothing changes any more."""
        for _ in range(rounds):
            self.cluster.settle_once()
            self.live()
            self.cluster.advance(2)
        for _ in range(3):
            self.cluster.settle_once()

    def condition(self, name: str) -> str:
        return next((c["status"] for c in self.status.get("conditions", ()) if c["type"] == name), "absent")

    def snapshot(self) -> dict[str, Any]:
        stored = next(c for c in self.cluster.of_kind("ConfigMap") if c["metadata"]["name"].endswith("-backends"))
        return dict(json.loads(stored["data"]["backends.json"]))


def renamed_as_by_an_older_version(serving: Serving) -> dict[str, str]:
    """Make the revisions those of a version with other hashes, in every object; return their new names by the old."""
    cluster = serving.cluster
    hashes = {found["name"][1:]: f"{number:010d}" for number, found in enumerate(serving.status["revisions"])}

    def renamed(body: Object) -> Object:
        text = json.dumps(body)
        for now, older in hashes.items():
            text = text.replace(now, older)
        return dict(json.loads(text))

    bodies = [renamed(cluster.objects.pop(key)) for key in list(cluster.objects)]
    for body in bodies:
        cluster.objects[key_of(body)] = body
        cluster._touch(body)
    cluster.reports = {uid: renamed(report) for uid, report in cluster.reports.items()}
    return {f"r{now}": f"r{older}" for now, older in hashes.items()}


def condition_of(status: dict[str, Any], name: str) -> dict[str, Any]:
    return next((dict(found) for found in status.get("conditions", ()) if found["type"] == name), {})


def label_of(pod: Object, name: str) -> str:
    return str(pod["metadata"]["labels"][f"stoker.dev/{name}"])


def running_engines(serving: Serving) -> list[Object]:
    return [found for found in serving.engines() if found["status"]["phase"] == "Running"]


def running_routers(serving: Serving) -> list[Object]:
    return [found for found in serving.cluster.pods("router") if found["status"]["phase"] == "Running"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "deployment",
                "pool",
                "run",
                "snapshots",
                "drain",
                "collect",
                "kill engine",
                "kill router",
                "vanish",
                "checkpoint",
                "scale",
                "wait",
            ]
        ),
        st.integers(0, 6),
    ),
    max_size=50,
)


def disturb(serving: Serving, event: str, number: int) -> None:
    cluster = serving.cluster
    engines, routers = cluster.pods("engine"), cluster.pods("router")
    if event in {"deployment", "pool"}:
        key = CHAT if event == "deployment" else POOL
        if key in cluster.objects:
            with contextlib.suppress(Crash):
                cluster.reconcile(key, crash_after=number if number < 6 else None)
    elif event == "run":
        for pod in [*engines, *routers][: number + 1]:
            if not pod["spec"].get("schedulingGates"):
                cluster.run(pod)
    elif event == "snapshots":
        serving.take_snapshots()
    elif event == "drain":
        serving.drain_engines()
    elif event == "collect":
        cluster.collect()
    elif event == "kill engine" and engines:
        cluster.kill(engines[number % len(engines)])
    elif event == "kill router" and routers:
        cluster.kill(routers[number % len(routers)])
    elif event == "vanish" and engines:
        cluster.vanish(engines[number % len(engines)])
    elif event == "checkpoint":
        serving.checkpoint(10 * (number + 1))
    elif event == "scale":
        cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=number % 4))
    elif event == "wait":
        cluster.advance(60 * number)
