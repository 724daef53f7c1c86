"""Manifests that bring a cluster's objects back on another one, which has the same volumes. Pure.

Data is not copied: a Checkpoint becomes one that adopts its folder, a job that has not ended goes on from its newest
verified checkpoint, a deployment names the checkpoint that it serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stoker.gateway.domain.resumption import continued_spec, newest_verified, of_job, usable
from stoker.gateway.domain.states import ENDED, job_state, phase_of
from stoker.gateway.domain.views import job_of
from stoker.gateway.problem import Problem

Object = dict[str, Any]
API = "stoker.dev/v1alpha1"
OURS = ("stoker.dev/", "kubectl.kubernetes.io/", "kueue.x-k8s.io/")
"""Prefixes of labels and annotations that belong to one cluster."""


@dataclass
class Backup:
    """What comes back, in the order in which it is applied, and a line for each thing that does not, or differently."""

    manifests: list[Object] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
        self.manifests.append(_manifest(found, spec))

    def note(self, found: Mapping[str, Any], text: str) -> None:
        metadata = found["metadata"]
        self.notes.append(f"{found['kind'].lower()}/{metadata['name']} ({metadata['namespace']}): {text}")


def back_up(jobs: Sequence[Object], checkpoints: Sequence[Object], deployments: Sequence[Object]) -> Backup:
    """The manifests of everything that can come back."""
    made = Backup()
    kept = [*_staying(made, checkpoints)]
    for checkpoint in kept:
        _checkpoint(made, checkpoint)
    for deployment in _staying(made, deployments):
        _deployment(made, deployment)
    for job in _staying(made, jobs):
        _job(made, job, [one for one in kept if _namespace(one) == _namespace(job)])
    return made


def _staying(made: Backup, objects: Sequence[Object]) -> Iterator[Object]:
    """The objects that are not being deleted; a deletion may take minutes, and would be undone."""
    for found in objects:
        if found["metadata"].get("deletionTimestamp"):
            made.note(found, "left out: it is being deleted")
        else:
            yield found


def _checkpoint(made: Backup, found: Object) -> None:
    if phase_of(found) != "Complete":
        made.note(found, f"left out: it is {phase_of(found)}")
        return
    spec, status = found["spec"], found.get("status") or {}
    (origin,) = (one for one in spec["source"].values() if one is not None)
    storage = dict(status.get("storage") or origin.get("storage") or {})
    if storage.get("claimName") and not storage.get("path") and not spec["source"].get("import"):
        storage["path"] = job_of(found).get("name") or found["metadata"]["name"]
    adopted = {"storage": storage, "folder": status.get("folder") or origin["folder"]}
    digest = status.get("digest") or origin.get("digest")
    kept = {name: spec[name] for name in ("pinned", "verification", "task") if spec.get(name)}
    made.add(found, {"source": {"import": {**adopted, **({"digest": digest} if digest else {})}}, **kept})
    if spec.get("deletionPolicy") == "Delete":
        made.note(found, "deletionPolicy becomes Retain: data that is adopted is never deleted")


def _deployment(made: Backup, found: Object) -> None:
    spec, model = found["spec"], found["spec"].get("model") or {}
    current = ((found.get("status") or {}).get("currentCheckpoint") or {}).get("name")
    if model.get("checkpointSelector") and current:
        rest = {name: value for name, value in model.items() if name != "checkpointSelector"}
        spec = {**spec, "model": {**rest, "checkpointRef": {"name": current}}}
        made.note(found, f"serves checkpoint {current}; put its checkpointSelector back when its job has saved")
    made.add(found, spec)


def _job(made: Backup, found: Object, checkpoints: Sequence[Object]) -> None:
    if job_state(found) in ENDED:
        made.note(found, f"left out: it is {phase_of(found)}")
        return
    if (found["spec"].get("run") or {}).get("cancel"):
        made.note(found, "left out: it is being cancelled")
        return
    newest = newest_verified(of_job(checkpoints, found))
    if newest is None or not usable(newest):
        made.add(found, found["spec"])
        made.note(found, _beginning(found["spec"]))
        return
    try:
        spec = continued_spec(found, newest, None)
    except Problem:
        made.note(found, f"left out: checkpoint {newest['metadata']['name']} has its last step")
        return
    if (found["spec"].get("run") or {}).get("suspend"):
        spec["run"] = {**spec["run"], "suspend": True}
    made.add(found, spec)
    made.note(found, f"goes on from checkpoint {newest['metadata']['name']}")


def _beginning(spec: Mapping[str, Any]) -> str:
    """The start of a job that has no verified checkpoint of its own."""
    source = (spec.get("modelFrom") or {}).get("checkpoint") or {}
    if source.get("state") == "All":
        return f"goes on from checkpoint {source['name']}, as it did: it has no verified checkpoint of its own"
    return "begins anew: it has no verified checkpoint"


def _namespace(found: Object) -> str:
    return str(found["metadata"]["namespace"])


def _manifest(found: Mapping[str, Any], spec: Mapping[str, Any]) -> Object:
    metadata = found["metadata"]
    own = {
        name: kept
        for name in ("labels", "annotations")
        if (kept := {key: text for key, text in (metadata.get(name) or {}).items() if not key.startswith(OURS)})
    }
    place = {"name": metadata["name"], "namespace": metadata["namespace"], **own}
    return {"apiVersion": API, "kind": found["kind"], "metadata": place, "spec": dict(spec)}
