"""One TrainingJob on this machine without an operator: admitted and rendered as the operator would, with folders for
its claims.

`prepare_run` makes the folders and files that the job mounts and returns what the trainer needs; it starts nothing.

Called by `stoker train`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.operator.admission.admission import Admission
from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.cluster.interface import Invalid
from stoker.operator.cluster.local.addresses import Addresses
from stoker.operator.cluster.local.gpus import find_devices
from stoker.operator.cluster.local.pod_address import host_of
from stoker.operator.cluster.local.pod_environment import container_environment
from stoker.operator.cluster.local.rewrite import Rewriter
from stoker.operator.cluster.local.volumes import LOCAL_FOLDER, MountError, PodVolumes
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.settings import Settings
from stoker.operator.domain.unsupported import unsupported
from stoker.operator.render.trainer import attempt_config, attempt_pods, pin

MAX_SOCKET_BYTES = 100
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "STOKER_NODE_RANK", "STOKER_POD_UID")
"""Variables that let several pods meet; a single agent chooses them itself."""


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to start."""

    folder: Path
    """Folder of this run below the storage: volumes, configuration, log."""
    config: Mapping[str, Any]
    environment: Mapping[str, str]


def prepare_run(
    manifests: Sequence[Mapping[str, Any]], storage: Path, claims: Mapping[str, Path], environment: Mapping[str, str]
) -> PreparedRun:
    """Prepare the only TrainingJob among the manifests.

    Args:
        storage: folder for the data of claims that have no folder in `claims`.
        environment: variables of this process; CUDA_VISIBLE_DEVICES limits the GPUs.

    Raises:
        ValueError: there is no single TrainingJob, or it is refused, or something that it mounts is missing.
        OSError: the storage cannot be written.
    """
    resource = _admitted(_only_job(manifests))
    _check_claims(resource["spec"], claims, storage)
    _check_gpus(resource["spec"]["workers"], environment)
    folder, number = _run_folder(storage, resource["metadata"]["name"])
    try:
        return _Run(manifests, resource, storage, folder, number).prepared()
    except (MountError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise error if isinstance(error, OSError) else ValueError(str(error)) from error


class _Run:
    """One attempt of the job with every path of this machine."""

    def __init__(
        self, manifests: Sequence[Mapping[str, Any]], resource: Object, storage: Path, folder: Path, number: int
    ) -> None:
        self.objects = {(found["kind"], found["metadata"]["name"]): dict(found) for found in manifests}
        self.storage = storage
        self.folder = folder
        self.number = number
        name = resource["metadata"]["name"]
        self.pod_uid = f"{name}-{number}"
        uid = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{storage}/{name}"))
        self.resource = {**resource, "metadata": {**resource["metadata"], "uid": uid, "generation": 1}}
        self.job = TrainingJob.model_validate(self.resource)

    def prepared(self) -> PreparedRun:
        """Make the folders and files that the job mounts; return the trainer's configuration and variables."""
        models = self.storage.absolute() / ".models"  # of all runs of this storage
        models.mkdir(parents=True, exist_ok=True)
        settings = Settings(model_cache_path=str(models))
        pinned = pin(self.job, None, settings)
        pod = attempt_pods(self.job, self.resource, pinned, self.number, settings)[0]
        pod["metadata"]["uid"] = self.pod_uid
        rendered = attempt_config(self.job, self.resource, pinned, self.number, None)
        self.objects["ConfigMap", rendered["metadata"]["name"]] = rendered
        self.objects["ConfigMap", settings.control_keys_config_map] = {"kind": "ConfigMap", "metadata": {}, "data": {}}
        volumes = PodVolumes(pod, self.folder, self.storage, self._find)
        rewriter = Rewriter(
            namespace=self.job.metadata.namespace,
            own=host_of(pod),
            paths=volumes.paths(),
            addresses=Addresses("ports", lambda _: True),
        )
        volumes.prepare(lambda _, content: content)
        variables = container_environment(pod, "127.0.0.1", self._find, os.cpu_count() or 1)
        own = {name: value for name, value in variables.items() if name not in RENDEZVOUS}
        environment = {"STOKER_NODE_RANK": "0", "STOKER_POD_UID": self.pod_uid, **rewriter.environment(own)}
        config: dict[str, Any] = rewriter.json(json.loads(rendered["data"]["config.json"]))
        return PreparedRun(self.folder, self._alone(config), environment)

    def _alone(self, config: dict[str, Any]) -> dict[str, Any]:
        """Adapt the configuration to one agent with every rank, which resumes, deletes old saves and logs by itself."""
        gang = config["gang"]
        ranks = gang["nodes"] * gang["ranks_per_node"]
        socket = config["listen"]["control_socket"]
        if len(os.fsencode(socket)) > MAX_SOCKET_BYTES:
            socket = str(Path(tempfile.gettempdir()) / f"stoker-{os.getpid()}.sock")
        own_log = str(self.folder / "log.jsonl")
        return {
            **config,
            "listen": {"host": "127.0.0.1", "port": 0, "control_socket": socket},
            "gang": {"nodes": 1, "ranks_per_node": ranks, "agents": []},
            "retention": "own",
            "resume": None,
            "checkpoint": {**config["checkpoint"], "max_to_keep": self.job.spec.checkpoint.max_to_keep},
            "logging": {**config["logging"], **({} if self.job.spec.logging.jsonl else {"jsonl": own_log})},
        }

    def _find(self, key: Key) -> Object | None:
        """Find an object of the manifests. A claim without a folder of its own is a folder of the storage."""
        found = self.objects.get((key.kind, key.name))
        if key.kind != "PersistentVolumeClaim":
            return found
        given = (found or {}).get("metadata", {}).get("annotations") or {}
        folder = given.get(LOCAL_FOLDER, str(self.storage / key.name))
        return {"kind": key.kind, "metadata": {"name": key.name, "annotations": {LOCAL_FOLDER: folder}}}


def _only_job(manifests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Find the one TrainingJob. Raises ValueError."""
    jobs = [manifest for manifest in manifests if manifest.get("kind") == "TrainingJob"]
    others = [manifest for manifest in manifests if manifest["kind"] != "PersistentVolumeClaim"]
    if len(jobs) != 1:
        found = ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in jobs or others)
        raise ValueError(f"exactly one TrainingJob is needed, found {len(jobs)}{f' ({found})' if found else ''}")
    return jobs[0]


def _admitted(job: Mapping[str, Any]) -> Object:
    """Admit the job and fill in its defaults.

    Raises:
        ValueError: admission refuses it, or it cannot run without an operator.
    """
    try:
        found = Admission(definition(info) for info in KIND_INFOS if info.kind == "TrainingJob").admit(job)
    except Invalid as refused:
        raise ValueError(str(refused)) from refused
    problems = list(unsupported("TrainingJob", found["spec"]))
    if (found["spec"].get("modelFrom") or {}).get("checkpoint"):
        problems.append(
            "not supported yet: spec.modelFrom.checkpoint without an operator (its Checkpoint object is in a cluster)"
        )
    for field in ("suspend", "cancel"):
        if found["spec"]["run"][field]:
            problems.append(f"spec.run.{field} is true: there is nothing to run (an operator would wait for a change)")
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _check_claims(spec: Mapping[str, Any], given: Mapping[str, Path], storage: Path) -> None:
    """Make sure that every `--claim` is one of the job's, and that a claim which is only read has a folder.

    Raises:
        ValueError: with the claims that the job has.
    """
    volumes = [volume.get("persistentVolumeClaim") for volume in spec["workers"].get("volumes") or ()]
    mounted = {claim["claimName"]: bool(claim.get("readOnly")) for claim in volumes if claim}
    own = spec["checkpoint"]["storage"].get("claimName")
    known = [*mounted, *([own] if own else [])]
    for name in given:
        if name not in known:
            raise ValueError(
                f"--claim {name}: the job has no such claim; it has {', '.join(sorted(set(known))) or 'none'}"
            )
    for name, read_only in mounted.items():
        if read_only and name not in given and not (storage / name).is_dir():
            raise ValueError(f"the job reads the claim {name}, which has no folder: give --claim {name}=DIR")


def _check_gpus(workers: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Make sure that the machine has the GPUs that the pods ask for together.

    Raises:
        ValueError: it has fewer.
    """
    per_pod, pods = workers["gpusPerPod"], workers["replicas"]
    have = len(find_devices(environment))
    if per_pod * pods > have:
        raise ValueError(f"spec.workers.gpusPerPod {per_pod} x replicas {pods}: this machine has {have} GPUs")


def _run_folder(storage: Path, name: str) -> tuple[Path, int]:
    """Make `<storage>/.runs/<job>-<number>` with the next number, which the names of this run's checkpoints carry."""
    runs = storage / ".runs"
    runs.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        folder = runs / f"{name}-{number}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return folder, number
