"""Rendering of a TrainingJob's attempt: headless Service, configuration, pods.

The rendering has two parts. The *base* (pod and configuration of the user's intent) is pinned in the job's status and
reused by every restart. The differences between attempts and pods are added to it.

Pure; called by the reconciler of TrainingJobs and by `service/local/single_run`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from stoker.operator.api.model_spec import FromHub
from stoker.operator.api.storage import StorageSpec
from stoker.operator.api.trainingjob import TrainingJob, TrainingJobSpec
from stoker.operator.api.trainingjob_status import Pinned
from stoker.operator.domain.labels import ATTEMPT, JOB_UID, ROLE
from stoker.operator.domain.placement.job_gang import gang_of_rendering
from stoker.operator.domain.plan import Object
from stoker.operator.domain.schedulers import Scheduler
from stoker.operator.domain.settings import Settings
from stoker.operator.render.attempt_group import attempt_group
from stoker.operator.render.model_fetch import MODEL_CACHE_FOLDER, fetch_variables, fetch_volumes
from stoker.operator.render.names import (
    attempt_config_name,
    digest_of,
    pod_address,
    stem,
    trainer_pod_name,
)
from stoker.operator.render.pod import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    KEYS_FOLDER,
    TERMINATION_LOG,
    WORK_FOLDER,
    PodProgram,
    claim_volume,
    config_volume,
    device_of,
    has_gpus,
    keys_volume,
    may_have_gpus,
    metadata_of,
    on_node,
    render_pod,
    scratch_volume,
    with_config_map,
    with_gate,
)
from stoker.operator.render.scheduling import for_scheduler
from stoker.operator.render.storage import bucket_mounts, settled, storage_root
from stoker.pod.writer import writer_of

START_FOLDER = "/var/stoker/start"
"""Mount of another claim with the weights to start from."""
WANDB_FOLDERS = ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")
"""Variables of Weights & Biases for its own files; the root file system of a pod is read-only."""
LOGS_FOLDER = "logs"
"""Folder of the metrics log, in that of the checkpoints."""
PLACEHOLDER = "stoker-attempt"
"""Name of the configuration's ConfigMap in the pinned base; each attempt has its own."""


@dataclass(frozen=True)
class StartCheckpoint:
    """Resolved Checkpoint of `modelFrom.checkpoint`."""

    storage: StorageSpec
    folder: str
    step: int
    digest: str
    default_path: str
    """Folder inside the claim if the storage names none."""


@dataclass(frozen=True)
class Resume:
    """Save that an attempt continues, with its absolute folder in the pod."""

    folder: str
    step: int
    digest: str


def shaping_fields(spec: TrainingJobSpec) -> dict[str, Any]:
    """Return the parts of the spec that shape pods and configuration, in wire form with defaults.

    Controls of the run, placement and retention are not among them.
    """
    wire = spec.to_wire()
    wire.pop("run", None)
    wire.pop("scheduling", None)
    wire["checkpoint"] = {
        key: value for key, value in wire["checkpoint"].items() if key not in {"maxToKeep", "deletionPolicy"}
    }
    return wire


def intent_of(spec: TrainingJobSpec) -> str:
    """Return the hash of the shaping fields."""
    return digest_of(shaping_fields(spec), 16)


def pin(
    job: TrainingJob, start: StartCheckpoint | None, settings: Settings, spec: Mapping[str, Any] | None = None
) -> Pinned:
    """Render the base for the job's present intent; `spec` is the job's in wire form, pinned with it."""
    rendered = {"config": _base_config(job, start, settings), "pod": _base_pod(job, start, settings)}
    return Pinned(
        intent=intent_of(job.spec),
        revision=digest_of(rendered),
        generation=job.metadata.generation,
        images={"trainer": job.spec.workers.image or settings.runtime_image},
        rendered=rendered,
        spec=None if spec is None else dict(spec),
    )


def service(job: TrainingJob, resource: Object, settings: Settings) -> Object:
    """Render the headless Service through which the pods of a gang find each other, ready or not."""
    name = stem(job.metadata.name, job.metadata.uid)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(resource, name, "trainer", job_labels(job)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_UID: job.metadata.uid, ROLE: "trainer"},
            "ports": [{"name": "http", "port": settings.agent_port}],
        },
    }


def attempt_config(job: TrainingJob, resource: Object, pinned: Pinned, attempt: int, resume: Resume | None) -> Object:
    """Render the configuration of one attempt, as a ConfigMap that all its pods mount."""
    base: Mapping[str, Any] = (pinned.rendered or {})["config"]
    nodes = base["gang"]["nodes"]
    config = {
        **base,
        "job": {**base["job"], "attempt": attempt, "writer": writer_of(job.metadata.uid, attempt)},
        "gang": {**base["gang"], "agents": [_agent_url(job, attempt, rank, base) for rank in range(nodes)]},
        "resume": {"folder": resume.folder, "step": resume.step, "digest": resume.digest} if resume else None,
    }
    name = attempt_config_name(job.metadata.name, job.metadata.uid, attempt)
    labels = {**job_labels(job), "attempt": str(attempt)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(resource, name, "trainer", labels),
        "data": {"config.json": json.dumps(config, indent=1, sort_keys=True)},
    }


def attempt_pods(
    job: TrainingJob,
    resource: Object,
    pinned: Pinned,
    attempt: int,
    settings: Settings,
    scheduler: Scheduler = "stoker",
    nodes: Sequence[str] | None = None,
) -> tuple[Object, ...]:
    """Render the pods of one attempt, by node rank, as their scheduler expects them.

    Args:
        nodes: of the pods, by rank, where they are chosen already; None: chosen while the pods wait with gates.
    """
    base: Mapping[str, Any] = (pinned.rendered or {})["pod"]
    gang = gang_of_rendering(pinned.rendered or {})
    pods = [_attempt_pod(job, resource, base, attempt, rank, settings) for rank in range(gang.size)]
    if nodes is not None:
        return tuple(starmap(on_node, zip(pods, nodes, strict=True)))
    if scheduler == "stoker" and settings.places_gangs:
        return tuple(map(with_gate, pods) if is_placed(job, gang.size, settings) else pods)
    group = attempt_group(job, scheduler, attempt, pinned.rendered or {})
    own = {JOB_UID: job.metadata.uid, ATTEMPT: str(attempt)}
    return tuple(for_scheduler(pod, group, rank, own) for rank, pod in enumerate(pods))


def is_placed(job: TrainingJob, nodes: int, settings: Settings) -> bool:
    """Whether the operator chooses the nodes of the gang.

    A single pod without GPUs is left to the scheduler, unless it has wishes or nodes to avoid.
    """
    alone = nodes == 1 and not has_gpus(job.spec.workers)
    wishes = job.spec.scheduling.topology or job.status.avoided_nodes or job.spec.run.elastic
    return settings.places_gangs and (not alone or bool(wishes))


def job_labels(job: TrainingJob) -> dict[str, str]:
    return {"job": job.metadata.name, "job-uid": job.metadata.uid}


def _attempt_pod(
    job: TrainingJob, resource: Object, base: Mapping[str, Any], attempt: int, rank: int, settings: Settings
) -> Object:
    uid, namespace = job.metadata.uid, job.metadata.namespace
    name = trainer_pod_name(job.metadata.name, uid, attempt, rank)
    subdomain = stem(job.metadata.name, uid)
    master = pod_address(trainer_pod_name(job.metadata.name, uid, attempt, 0), subdomain, namespace)
    labels = {**job_labels(job), "attempt": str(attempt), "node-rank": str(rank)}
    own = metadata_of(resource, name, "trainer", labels)
    user = base.get("metadata", {})
    own["labels"] = {**user.get("labels", {}), **own["labels"]}
    if user.get("annotations"):
        own["annotations"] = user["annotations"]
    env = {"STOKER_NODE_RANK": str(rank), "MASTER_ADDR": master, "MASTER_PORT": str(settings.rendezvous_port)}
    spec = {**base["spec"], "hostname": name, "subdomain": subdomain}
    config_name = attempt_config_name(job.metadata.name, uid, attempt)
    spec["volumes"] = with_config_map(spec["volumes"], PLACEHOLDER, config_name)
    main, *others = spec["containers"]
    rendezvous = [{"name": key, "value": value} for key, value in env.items()]
    spec["containers"] = [{**main, "env": [*main["env"], *rendezvous]}, *others]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": spec}


def _agent_url(job: TrainingJob, attempt: int, rank: int, base: Mapping[str, Any]) -> str:
    name = trainer_pod_name(job.metadata.name, job.metadata.uid, attempt, rank)
    address = pod_address(name, stem(job.metadata.name, job.metadata.uid), job.metadata.namespace)
    return f"http://{address}:{base['listen']['port']}"


def _base_pod(job: TrainingJob, start: StartCheckpoint | None, settings: Settings) -> Object:
    workers = job.spec.workers
    pairs = [
        config_volume(PLACEHOLDER),
        keys_volume(settings),
        scratch_volume("stoker-work", WORK_FOLDER),
        scratch_volume("stoker-tmp", "/tmp"),
    ]
    storage = job.spec.checkpoint.storage
    if storage.claim_name is not None:
        pairs.append(claim_volume(storage.claim_name, read_only=False))
    if may_have_gpus(workers):
        pairs.append(scratch_volume("stoker-shm", "/dev/shm", "Memory"))
    starts = [] if start is None else [_start_place(job, start)]
    buckets = bucket_mounts((storage, job.metadata.name), *starts)
    pairs += [*buckets.volumes, *fetch_volumes(_hub(job.spec) is not None, None, settings)]
    if start is not None and start.storage.claim_name not in (None, storage.claim_name):
        claim = {"claimName": str(start.storage.claim_name), "readOnly": True}
        pairs.append(
            (
                {"name": "stoker-start", "persistentVolumeClaim": claim},
                {"name": "stoker-start", "mountPath": START_FOLDER, "readOnly": True},
            )
        )
    program = PodProgram(
        image=workers.image or settings.runtime_image,
        command=[*settings.python, "-m", "stoker.trainer", "--config", CONFIG_FILE],
        port=settings.agent_port,
        volumes=[volume for volume, _ in pairs],
        mounts=[mount for _, mount in pairs],
        grace_period_s=workers.grace_period_seconds,
        env={
            **buckets.env,
            **fetch_variables(_hub(job.spec) is not None, None),
            **(dict.fromkeys(WANDB_FOLDERS, f"{WORK_FOLDER}/wandb") if job.spec.logging.wandb else {}),
        },
    )
    pod = render_pod({"name": PLACEHOLDER}, program, workers, settings)
    main = pod["spec"]["containers"][0]
    main["env"] = [*_secret_variables(job.spec), *main.get("env", [])]
    return {"metadata": {key: value for key, value in pod["metadata"].items() if key != "name"}, "spec": pod["spec"]}


def _base_config(job: TrainingJob, start: StartCheckpoint | None, settings: Settings) -> dict[str, Any]:
    spec = job.spec
    config = {
        "job": {"namespace": job.metadata.namespace, "name": job.metadata.name, "uid": job.metadata.uid},
        "listen": {
            "host": "0.0.0.0",
            "port": settings.agent_port,
            "control_keys": KEYS_FOLDER,
            "control_socket": f"{WORK_FOLDER}/control.sock",
        },
        "gang": {"nodes": spec.workers.replicas, "ranks_per_node": spec.workers.ranks},
        "termination_log": TERMINATION_LOG,
        "work_dir": WORK_FOLDER,
        **_section(spec.runtime),
        "device": device_of(spec.runtime.device, spec.workers),
        "parallelism": _section(spec.parallelism),
        "training": _section(spec.training),
        "optimization": _section(spec.optimization),
        "memory": _section(spec.memory),
        "data": _section(spec.data),
        "checkpoint": _checkpoint_section(spec, job.metadata.name),
        "guards": _section(spec.guards),
        "logging": {**_metrics_log(job), **_logging_section(spec)},
        "retention": "external",
        "deadlines": {
            "load_s": spec.deadlines.load_seconds,
            "first_step_s": spec.deadlines.first_step_seconds,
            "step_s": spec.deadlines.step_seconds,
            "save_s": spec.deadlines.save_seconds,
            "validation_s": spec.deadlines.validation_seconds,
        },
        "grace_period_s": spec.workers.grace_period_seconds,
    }
    if spec.model is not None:
        config["model"] = _model_section(spec)
    else:
        config["model_from"] = _model_from(spec, start)
    if spec.lora is not None:
        config["lora"] = _section(spec.lora)
    return config


def _checkpoint_section(spec: TrainingJobSpec, job_name: str) -> dict[str, Any]:
    section = _section(spec.checkpoint)
    for key in ("storage", "deletion_policy", "max_to_keep"):
        section.pop(key, None)
    return {**section, "root": storage_root(spec.checkpoint.storage, job_name)}


def _metrics_log(job: TrainingJob) -> dict[str, Any]:
    """The metrics log beside the checkpoints, which outlives the pods; a bucket has none."""
    storage, name = job.spec.checkpoint.storage, job.metadata.name
    if storage.claim_name is None:
        return {}
    return {"jsonl": f"{storage_root(storage, name)}/{LOGS_FOLDER}/{name}-{job.metadata.uid[:8]}.jsonl"}


def _logging_section(spec: TrainingJobSpec) -> dict[str, Any]:
    """The targets without their secrets, which the pod has as variables."""
    section = _section(spec.logging)
    for target, reference in (("wandb", "api_key_secret_ref"), ("mlflow", "token_secret_ref")):
        section.get(target, {}).pop(reference, None)
    return section


def _secret_variables(spec: TrainingJobSpec) -> list[dict[str, Any]]:
    """Variables of the packages that write to a server or read from one."""
    wandb, mlflow, hub = spec.logging.wandb, spec.logging.mlflow, _hub(spec)
    found = [
        ("WANDB_API_KEY", wandb.api_key_secret_ref if wandb else None),
        ("MLFLOW_TRACKING_TOKEN", mlflow.token_secret_ref if mlflow else None),
        ("HF_TOKEN", hub.token_secret_ref if hub else None),
    ]
    return [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": key.name, "key": key.key}}} for name, key in found if key
    ]


def _model_section(spec: TrainingJobSpec) -> dict[str, Any]:
    assert spec.model is not None
    model = spec.model
    defaults = {
        "num_kv_heads": model.num_kv_heads or model.num_heads,
        "head_dim": model.head_dim or model.hidden_size // model.num_heads,
        "max_position_embeddings": model.max_position_embeddings or spec.training.sequence_length,
    }
    section = {**_section(model), **defaults}
    for name in (
        "rope_theta",
        "norm_eps",
        "initializer_range",
        "router_aux_loss_coef",
        "router_z_loss_coef",
    ):  # decimal strings in the resource, floats for the model
        section[name] = float(section[name])
    if scaling := section.get("rope_scaling"):
        factors = ("factor", "low_freq_factor", "high_freq_factor")
        section["rope_scaling"] = {**scaling, **{name: float(scaling[name]) for name in factors}}
    return section


def _model_from(spec: TrainingJobSpec, start: StartCheckpoint | None) -> dict[str, Any]:
    source = spec.model_from
    assert source is not None
    if source.hugging_face is not None:
        return {"kind": "huggingFace", "path": source.hugging_face.path}
    if source.gguf is not None:
        return {"kind": "gguf", "path": source.gguf.path}
    if source.hub is not None:
        uri = f"hf://{source.hub.id}@{source.hub.revision}"
        return {"kind": "huggingFace", "path": uri, "cache": MODEL_CACHE_FOLDER}
    assert start is not None, "the caller resolves modelFrom.checkpoint before it renders"
    return {"kind": "checkpoint", "path": start_folder(spec, start), "digest": start.digest}


def _hub(spec: TrainingJobSpec) -> FromHub | None:
    return spec.model_from.hub if spec.model_from else None


def _start_place(job: TrainingJob, start: StartCheckpoint) -> tuple[StorageSpec, str]:
    """Return the storage of the start; its one folder where another server has it under the name of the job's place."""
    own = settled(job.spec.checkpoint.storage, job.metadata.name).s3
    there = settled(start.storage, start.default_path).s3
    if own is None or there is None or own == there or (own.bucket, own.prefix) != (there.bucket, there.prefix):
        return start.storage, start.default_path
    folder = "/".join(part for part in (there.prefix, start.folder) if part)
    return StorageSpec(s3=there.model_copy(update={"prefix": folder})), ""


def start_folder(spec: TrainingJobSpec, start: StartCheckpoint) -> str:
    """Return the starting checkpoint's folder in the pod."""
    same_claim = start.storage.claim_name == spec.checkpoint.storage.claim_name
    mount = CHECKPOINT_FOLDER if same_claim else START_FOLDER
    return f"{storage_root(start.storage, start.default_path, mount)}/{start.folder}"


def _section(section: Any) -> dict[str, Any]:
    """Return a section with the data plane's names, without absent members."""
    plain: dict[str, Any] = section.model_dump(mode="json", exclude_none=True)
    return plain
