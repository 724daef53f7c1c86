"""Argo CD and Flux read every kind and phase as the operator means it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

import pytest
import yaml

from stoker.operator.api.checkpoint import CheckpointPhase
from stoker.operator.api.enginepool import PoolPhase
from stoker.operator.api.inferencedeployment import DeploymentPhase
from stoker.operator.api.trainingjob_status import TrainingPhase
from stoker.operator.domain.conditions import Health, merge, summary
from stoker.operator.domain.plan import Object
from stoker.pod.causes import Cause
from testing.operator.gitops_health import FOLDER, ArgoHealth, FluxHealth
from testing.operator.serving_world import CHAT, POOL, Serving
from testing.operator.training_world import JOB, Run

PHASES: dict[str, tuple[str, ...]] = {
    "TrainingJob": get_args(TrainingPhase),
    "Checkpoint": get_args(CheckpointPhase),
    "InferenceDeployment": get_args(DeploymentPhase),
    "EnginePool": get_args(PoolPhase),
}
AT_REST = ("Suspended", "ScaledToZero")
"""Phases in which nothing runs because the spec asks for it."""


def made(kind: str, phase: str, health: Health) -> Object:
    """An object in a phase, with the conditions that the operator writes."""
    conditions = merge((), summary(health, "Reason", "why"), datetime(2026, 1, 1, tzinfo=UTC), 3)
    status = {"phase": phase, "observedGeneration": 3, "conditions": conditions}
    metadata = {"name": "one", "namespace": "default", "generation": 3}
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": kind,
        "metadata": metadata,
        "spec": {},
        "status": status,
    }


def wanted(phase: str, health: Health) -> tuple[str, str]:
    """What Argo CD and Flux must say."""
    if health is Health.STALLED:
        return "Degraded", "Failed"
    if phase in AT_REST:
        return "Suspended", "Current"
    return {Health.READY: ("Healthy", "Current"), Health.PROGRESSING: ("Progressing", "InProgress")}.get(
        health, ("Progressing", "InProgress")
    )


@pytest.mark.parametrize("kind", PHASES)
def test_every_phase_of_every_kind_has_its_health(kind: str) -> None:
    argo, flux = ArgoHealth(kind), FluxHealth(kind) if kind != "EnginePool" else None
    for phase in PHASES[kind]:
        for health in Health:
            found = made(kind, phase, health)
            status, message = argo(found)
            assert (status, message) == (wanted(phase, health)[0], "why"), (phase, health)
            assert flux is None or flux(found) == wanted(phase, health)[1], (phase, health)


def test_what_the_operator_has_not_seen_is_under_way() -> None:
    argo, flux = ArgoHealth("TrainingJob"), FluxHealth("TrainingJob")
    new = {"metadata": {"name": "one", "generation": 1}, "spec": {}}
    edited = made("TrainingJob", "Completed", Health.READY)
    edited["metadata"]["generation"] = 4
    for found in (new, edited):
        assert argo(found)[0] == "Progressing"
        assert flux(found) == "InProgress"
    assert argo(edited)[1] == "the operator has not seen the last change yet"
    leaving = made("TrainingJob", "Completed", Health.READY)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert argo(leaving) == ("Progressing", "is being deleted")


def _job_story() -> Iterator[tuple[str, Object]]:
    """A job as the reconcilers leave it: the health to expect, and the object."""
    run = Run()
    run.cluster.settle()
    yield "Progressing", run.job
    run.start()
    yield "Progressing", run.job
    run.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=True))
    run.cluster.reconcile(JOB)
    yield "Progressing", run.job
    for pod in run.gang:
        run.cluster.end(pod, Cause.INTERRUPTED, step=30, saves=(run.word(30),))
    run.cluster.settle()
    yield "Suspended", run.job
    run.cluster.change_spec(JOB, lambda spec: spec["run"].update(suspend=False))
    run.next_attempt()
    yield "Progressing", run.job
    for pod in run.gang:
        run.cluster.end(pod, Cause.COMPLETED, step=100, saves=(run.word(100),))
    run.cluster.settle()
    yield "Healthy", run.job
    failing = Run(run={"backoffLimit": 0})
    failing.start()
    for pod in failing.gang:
        failing.cluster.end(pod, Cause.DATA_ERROR)
    failing.cluster.settle()
    yield "Degraded", failing.job


def test_a_jobs_life_is_read_as_it_is() -> None:
    argo, flux = ArgoHealth("TrainingJob"), FluxHealth("TrainingJob")
    names = {"Progressing": "InProgress", "Suspended": "Current", "Healthy": "Current", "Degraded": "Failed"}
    for expected, found in _job_story():
        assert argo(found)[0] == expected, found["status"]
        assert flux(found) == names[expected], found["status"]


def test_a_deployments_life_is_read_as_it_is() -> None:
    argo, pool, flux = ArgoHealth("InferenceDeployment"), ArgoHealth("EnginePool"), FluxHealth("InferenceDeployment")
    serving = Serving(replicas=1)
    serving.cluster.settle()
    waiting = serving.cluster.objects[CHAT]
    assert (argo(waiting)[0], flux(waiting)) == ("Progressing", "InProgress")
    assert "checkpoint" in argo(waiting)[1].lower()
    serving.checkpoint(10)
    serving.rest()
    served = serving.cluster.objects[CHAT]
    assert served["status"]["phase"] == "Serving"
    assert (argo(served)[0], flux(served)) == ("Healthy", "Current")
    assert pool(serving.cluster.objects[POOL])[0] == "Healthy"


def test_the_scripts_of_argo_cd_are_one_file() -> None:
    config = yaml.safe_load((FOLDER / "argocd-cm.yaml").read_text())
    script = (FOLDER / "health.lua").read_text()
    assert set(config["data"].values()) == {script}
    assert {name.rpartition("_")[2] for name in config["data"]} == set(PHASES)
    assert Path(FOLDER / "flux-kustomization.yaml").exists()
