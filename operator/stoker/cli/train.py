"""`stoker train`: one TrainingJob without an operator. The manifest is admitted and rendered as the operator would, its claims become
folders, and this process becomes the trainer."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from stoker.cli.exit_status import WRONG_INPUT
from stoker.cli.programs import become

MAX_SOCKET_BYTES = 100


@click.command(
    epilog="Example: stoker train -f examples/pretrain/20-train.yaml --claim corpus=my-code/ --storage runs/"
)
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="Manifests: one TrainingJob, and the ConfigMaps and Secrets that it mounts.",
)
@click.option(
    "--storage",
    type=click.Path(path_type=Path),
    default=Path("stoker-storage"),
    show_default=True,
    help="Folder for the data of claims, one folder each.",
)
@click.option("--claim", "claims", multiple=True, metavar="NAME=DIR", help="Let a claim stand for a folder.")
@click.option("--render", is_flag=True, help="Print the trainer's configuration and stop.")
def train(files: tuple[Path, ...], storage: Path, claims: tuple[str, ...], render: bool) -> None:
    """Run one training job on this machine, without an operator, with all its ranks.

    Checkpoints go to the job's claim below --storage; a second run goes on from the newest verified one. Ctrl-C saves and ends.
    """
    from stoker.cli.local import parse_claims
    from stoker.cli.manifests import ManifestError, claim_manifest, read_manifests

    folders = parse_claims(claims)
    try:
        manifests = [*read_manifests(files), *(claim_manifest(name, path, "default") for name, path in folders.items())]
        run = LocalRun(manifests, storage.expanduser().resolve(), folders)
    except (ManifestError, ValueError) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"--storage {storage}: {error.filename}: {error.strerror}")
    config = run.prepare()
    if render:
        click.echo(json.dumps(config, indent=1))
        shutil.rmtree(run.folder)
        return
    file = run.folder / "config.json"
    file.write_text(json.dumps(config, indent=1))
    os.environ.update(run.environment)
    become("stoker.trainer", ["--config", str(file)])


class LocalRun:
    """One run of one job: its folders, and its configuration with every path of this machine.

    Raises:
        ValueError: the manifests hold no single TrainingJob, or it is refused, or something it mounts is missing.
        OSError: the storage cannot be written.
    """

    def __init__(self, manifests: Sequence[Mapping[str, Any]], storage: Path, claims: Mapping[str, Path]) -> None:
        from stoker.operator.api.trainingjob import TrainingJob

        self.storage = storage
        self.objects = {(o["kind"], o["metadata"]["name"]): dict(o) for o in manifests}
        resource = _admitted(_only_job(manifests))
        _check_claims(resource["spec"], claims, storage)
        _check_gpus(resource["spec"]["workers"])
        self.name: str = resource["metadata"]["name"]
        self.folder, self.number = _run_folder(storage, self.name)
        self.environment = {"STOKER_NODE_RANK": "0", "STOKER_POD_UID": f"{self.name}-{self.number}"}
        uid = str(uuid.uuid5(uuid.NAMESPACE_URL, f"{storage}/{self.name}"))
        self.resource = {**resource, "metadata": {**resource["metadata"], "uid": uid, "generation": 1}}
        self.job = TrainingJob.model_validate(self.resource)

    def prepare(self) -> dict[str, Any]:
        """Make the folders and files that the job mounts; the trainer's configuration."""
        from stoker.operator.cluster.local.addresses import Addresses
        from stoker.operator.cluster.local.pod_address import host_of
        from stoker.operator.cluster.local.pod_environment import container_environment
        from stoker.operator.cluster.local.rewrite import Rewriter
        from stoker.operator.cluster.local.volumes import MountError, PodVolumes
        from stoker.operator.domain.settings import Settings
        from stoker.operator.render.trainer import attempt_config, attempt_pods, pin

        settings = Settings()
        pinned = pin(self.job, None, settings)
        pod = attempt_pods(self.job, self.resource, pinned, self.number, settings)[0]
        rendered = attempt_config(self.job, self.resource, pinned, self.number, None)
        pod["metadata"]["uid"] = self.environment["STOKER_POD_UID"]
        self.objects["ConfigMap", rendered["metadata"]["name"]] = rendered
        self.objects["ConfigMap", settings.control_keys_config_map] = {"kind": "ConfigMap", "metadata": {}, "data": {}}
        volumes = PodVolumes(pod, self.folder, self.storage, self._find)
        rewriter = Rewriter(
            namespace=self.job.metadata.namespace,
            own=host_of(pod),
            paths=volumes.paths(),
            addresses=Addresses("ports", lambda _: True),
        )
        try:
            volumes.prepare(lambda _, content: content)
            variables = container_environment(pod, "127.0.0.1", self._find)
        except (MountError, OSError) as error:
            _refuse(str(error))
        rendezvous = ("MASTER_ADDR", "MASTER_PORT", "STOKER_NODE_RANK", "STOKER_POD_UID")
        own = {name: value for name, value in variables.items() if name not in rendezvous}
        self.environment |= rewriter.environment(own)
        config: dict[str, Any] = rewriter.json(json.loads(rendered["data"]["config.json"]))
        return self._alone(config)

    def _alone(self, config: dict[str, Any]) -> dict[str, Any]:
        """Without an operator and with every rank in one agent: who else would choose, keep and gather?"""
        gang = config["gang"]
        ranks = gang["nodes"] * gang["ranks_per_node"]
        socket = config["listen"]["control_socket"]
        if len(os.fsencode(socket)) > MAX_SOCKET_BYTES:
            socket = str(Path(tempfile.gettempdir()) / f"stoker-{os.getpid()}.sock")
        return {
            **config,
            "listen": {"host": "127.0.0.1", "port": 0, "control_socket": socket},
            "gang": {"nodes": 1, "ranks_per_node": ranks, "agents": []},
            "retention": "own",
            "resume": None,
            "checkpoint": {**config["checkpoint"], "max_to_keep": self.job.spec.checkpoint.max_to_keep},
            "logging": {**config["logging"], "jsonl": config["logging"].get("jsonl") or str(self.folder / "log.jsonl")},
        }

    def _find(self, key: Any) -> Any:
        """Objects of the manifests. A claim, with or without one, is a folder of the storage unless it was given another."""
        from stoker.operator.cluster.local.volumes import LOCAL_FOLDER

        found = self.objects.get((key.kind, key.name))
        if key.kind != "PersistentVolumeClaim":
            return found
        given = (found or {}).get("metadata", {}).get("annotations") or {}
        folder = given.get(LOCAL_FOLDER, str(self.storage / key.name))
        return {"kind": key.kind, "metadata": {"name": key.name, "annotations": {LOCAL_FOLDER: folder}}}


def _only_job(manifests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    jobs = [manifest for manifest in manifests if manifest.get("kind") == "TrainingJob"]
    others = [manifest for manifest in manifests if manifest["kind"] != "PersistentVolumeClaim"]
    if len(jobs) != 1:
        found = ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in jobs or others)
        raise ValueError(f"exactly one TrainingJob is needed, found {len(jobs)}{f' ({found})' if found else ''}")
    return jobs[0]


def _admitted(job: Mapping[str, Any]) -> dict[str, Any]:
    from stoker.operator.admission.admission import Admission
    from stoker.operator.api.crd import KIND_INFOS, definition
    from stoker.operator.cluster.interface import Invalid
    from stoker.operator.domain.unsupported import unsupported

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
    """Every `--claim` is one of the job's, and a claim that the job only reads has a folder.

    Raises:
        ValueError: with the claims that the job has.
    """
    volumes = [volume.get("persistentVolumeClaim") for volume in spec["workers"].get("volumes") or ()]
    mounted = {claim["claimName"]: bool(claim.get("readOnly")) for claim in volumes if claim}
    known = [*mounted, spec["checkpoint"]["storage"].get("claimName")]
    for name in given:
        if name not in known:
            raise ValueError(f"--claim {name}: the job has no such claim; it has {', '.join(sorted(set(known)))}")
    for name, read_only in mounted.items():
        if read_only and name not in given and not (storage / name).is_dir():
            raise ValueError(f"the job reads the claim {name}, which has no folder: give --claim {name}=DIR")


def _check_gpus(workers: Mapping[str, Any]) -> None:
    """The machine has the GPUs that the pods ask for together.

    Raises:
        ValueError: it has fewer.
    """
    from stoker.operator.cluster.local.gpus import find_devices

    per_pod, pods = workers["gpusPerPod"], workers["replicas"]
    have = len(find_devices(os.environ))
    if per_pod * pods > have:
        raise ValueError(f"spec.workers.gpusPerPod {per_pod} x replicas {pods}: this machine has {have} GPUs")


def _run_folder(storage: Path, name: str) -> tuple[Path, int]:
    """`<storage>/.runs/<job>-<number>`, the next number: part of the names of the checkpoints that this run writes."""
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


def _refuse(message: str) -> NoReturn:
    click.echo(f"error: {message}", err=True)
    sys.exit(WRONG_INPUT)
