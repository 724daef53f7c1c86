"""A simulated cluster with one TrainingJob of two pods, for the tests of TrainingJob and Checkpoint."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import strategies as st

from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.checkpoint.reconcile import reconcile_checkpoint
from stoker.operator.reconcile.trainingjob.reconcile import reconcile_trainingjob
from stoker.pod.causes import Cause
from stoker.pod.writer import writer_of
from testing.operator.simulated_cluster import Crash, SimulatedCluster

JOB = Key("TrainingJob", "default", "run")


METRIC_NAMES = ("tokens", "loss", "learning_rate", "elapsed_s", "bytes", "files", "pieces")


SAVE_METRICS = {
    "tokens": 640,
    "loss": "2",
    "learningRate": "0.0003",
    "elapsedSeconds": 61,
    "bytes": 10,
    "files": 4,
    "pieces": 9,
}
"""Numbers of `Run.save` as the status of its Checkpoint has them."""


class Run:
    """A cluster with one job of two pods, and an environment that behaves."""

    def __init__(self, settings: Settings | None = None, **spec: Any) -> None:
        reconcilers = {"TrainingJob": reconcile_trainingjob, "Checkpoint": reconcile_checkpoint}
        self.cluster = SimulatedCluster(reconcilers, settings)
        self.cluster.add(
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "claim"}, "spec": {}}
        )
        body = {
            "model": {
                "architecture": "llama",
                "hiddenSize": 64,
                "intermediateSize": 128,
                "numLayers": 2,
                "numHeads": 4,
                "vocabSize": 512,
            },
            "workers": {"replicas": 2},
            "training": {"totalSteps": 100},
            "data": {"sources": [{"name": "text", "path": "/data/text.txt"}]},
            "checkpoint": {"storage": {"claimName": "claim"}},
            **spec,
        }
        body = {name: section for name, section in body.items() if section is not None}
        self.cluster.add(
            {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "run"}, "spec": body}
        )

    @property
    def job(self) -> Object:
        return self.cluster.objects[JOB]

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.job.get("status", {}))

    @property
    def attempt(self) -> int:
        return int(self.status["attempt"]["number"])

    @property
    def gang(self) -> list[Object]:
        number = str(self.attempt) if "attempt" in self.status else ""
        return [p for p in self.cluster.pods("trainer") if p["metadata"]["labels"]["stoker.dev/attempt"] == number]

    def start(self) -> None:
        self.cluster.settle()
        for pod in self.gang:
            self.cluster.run(pod)
        self.train(0)

    def folder(self, step: int) -> str:
        return f"step-{step:08d}.{writer_of(self.job['metadata']['uid'], self.attempt)}"

    def train(self, step: int, saves: tuple[dict[str, Any], ...] = ()) -> None:
        """Set the report of pod 0's agent."""
        body = {
            "attempt": self.attempt,
            "phase": "Training",
            "step": step,
            "total_steps": 100,
            "loss": 2.5,
            "sources": [{"name": "web", "samples": 8 * step, "sequences": 32}],
            "saves": list(saves),
        }
        leader = next(p for p in self.gang if p["metadata"]["labels"]["stoker.dev/node-rank"] == "0")
        self.cluster.report(leader, body)
        self.cluster.settle()

    def save(self, step: int, verified: bool | None = True, id_: str = "") -> dict[str, Any]:
        folder = self.folder(step)
        return {
            "id": id_ or folder,
            "folder": folder,
            "step": step,
            "digest": f"digest{step}",
            "verified": verified,
            "state": "Committed",
            "tokens": 640,
            "loss": 2.0,
            "learning_rate": 3e-4,
            "elapsed_s": 61.7,
            "bytes": 10,
            "files": 4,
            "pieces": 9,
        }

    def word(self, step: int, verified: bool | None = True) -> dict[str, Any]:
        known = self.save(step, verified)
        names = ("id", "folder", "step", "digest", "verified")
        return {name: known[name] for name in names} | {"metrics": {name: known[name] for name in METRIC_NAMES}}

    def next_attempt(self) -> None:
        """End old pods, wait out the delay and run a new gang."""
        for _ in range(6):
            self.cluster.settle()
            self.cluster.collect()
            self.cluster.advance(400)
            self.cluster.settle()
            self.answer_tasks("list", saves=[])
        for pod in self.gang:
            self.cluster.run(pod)
        self.cluster.settle()

    def answer_tasks(self, verb: str, *, ok: bool = True, **result: Any) -> None:
        for pod in self.cluster.pods("task"):
            if pod["metadata"]["labels"]["stoker.dev/task"] == verb and pod["status"]["phase"] == "Pending":
                self.cluster.run(pod)
                answer = {"task": verb, "ok": ok, **result}
                self.cluster.end(pod, Cause.COMPLETED if ok else Cause.TASK_FAILED, result=answer)
        self.cluster.settle()

    def checkpoint(self, step: int) -> Object:
        return next(
            c for c in self.cluster.of_kind("Checkpoint") if c["spec"]["source"].get("save", {}).get("step") == step
        )

    def condition(self, found: Object, name: str) -> str:
        return next((c["status"] for c in found["status"].get("conditions", ()) if c["type"] == name), "absent")


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "job",
                "checkpoints",
                "run",
                "train",
                "save",
                "fail",
                "kill",
                "vanish",
                "complete",
                "tasks",
                "collect",
                "wait",
                "suspend",
                "go on",
            ]
        ),
        st.integers(0, 6),
    ),
    max_size=40,
)


def disturb(run: Run, event: str, number: int) -> None:
    """Apply one disturbance; `number` picks the pod, the step or the point of a crash."""
    cluster, gang = run.cluster, run.gang if "attempt" in run.status else []
    running = [pod for pod in gang if pod["status"]["phase"] == "Running"]
    if event == "job":
        crash(cluster, JOB, number)
    elif event == "checkpoints":
        for found in cluster.of_kind("Checkpoint"):
            crash(cluster, Key("Checkpoint", "default", found["metadata"]["name"]), number)
    elif event == "run":
        for pod in gang[: number + 1]:
            cluster.run(pod)
    elif event in {"train", "save"} and running and running[0]["metadata"]["labels"]["stoker.dev/node-rank"] == "0":
        old = cluster.reports.get(running[0]["metadata"]["uid"], {"saves": [], "step": 0})
        step = old["step"] + number
        saves = [*old["saves"], *([run.save(step, [None, True][number % 2])] if event == "save" and step else [])]
        cluster.report(running[0], {"attempt": run.attempt, "phase": "Training", "step": step, "saves": saves})
    elif event == "fail" and running:
        causes = [
            Cause.RANK_FAILED,
            Cause.HANG,
            Cause.OUT_OF_MEMORY,
            Cause.INTERRUPTED,
            Cause.CHECKPOINT_CORRUPT,
            Cause.STORAGE_ERROR,
        ]
        cluster.end(running[number % len(running)], causes[number % len(causes)])
    elif event == "kill" and running:
        cluster.kill(running[number % len(running)])
    elif event == "vanish" and gang:
        cluster.vanish(gang[number % len(gang)])
    elif event == "complete" and len(running) == 2:
        cluster.end(running[number % 2], Cause.COMPLETED)
    elif event == "tasks":
        for verb in ("verify", "list"):
            for pod in cluster.pods("task"):
                if pod["metadata"]["labels"]["stoker.dev/task"] == verb and pod["status"]["phase"] == "Pending":
                    cluster.end(pod, Cause.COMPLETED, result={"task": verb, "ok": True, "saves": []})
    elif event == "collect":
        cluster.collect()
    elif event == "wait":
        cluster.advance(60 * number)
    elif event in {"suspend", "go on"}:
        cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=event == "suspend"))


def crash(cluster: SimulatedCluster, key: Key, point: int) -> None:
    with contextlib.suppress(Crash):
        cluster.reconcile(key, crash_after=point if point < 6 else None)
