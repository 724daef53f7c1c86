"""Rendering of engines: the template of a replica from an InferenceDeployment, then pods and configuration from it.

A template is rendered once per revision and frozen in the EnginePool: a newer operator makes the same pods from it.

Pure; called by the reconcilers of InferenceDeployment and EnginePool.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.operator.api.engine_settings import CacheEventSettings, CacheSettings, DiskSettings, TransferSettings
from stoker.operator.api.enginepool import EnginePool, EngineTemplate, Revision
from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.pool import Pool
from stoker.operator.api.storage import StorageSpec
from stoker.operator.domain.labels import (
    DEPLOYMENT,
    DEPLOYMENT_UID,
    NODE_RANK,
    POD_GROUP,
    POOL,
    RANK_PODS,
    REPLICA,
    REPLICA_PODS,
    ROLE,
    SCHEDULER,
)
from stoker.operator.domain.placement.gang import Level
from stoker.operator.domain.placement.pod_affinity import kept_together
from stoker.operator.domain.placement.replica_gang import gang_of_replica
from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import Settings
from stoker.operator.render.model_fetch import MODEL_CACHE_FOLDER, fetch_variables, fetch_volumes
from stoker.operator.render.names import pod_address
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
    keys_volume,
    may_have_gpus,
    metadata_of,
    render_pod,
    scratch_volume,
    with_config_map,
    with_gate,
)
from stoker.operator.render.replica_key import replica_secret_name
from stoker.operator.render.scheduling import SchedulerGroup, for_scheduler, levels_of
from stoker.operator.render.storage import BucketMounts, bucket_mounts, storage_root
from stoker.operator.render.transfer_key import transfer_secret_name

FETCHED_SCHEMES = ("hf://", "s3://", "oci://")
PLACEHOLDER = "stoker-revision"
"""Name of the configuration's ConfigMap in a template; each revision has its own."""
API_KEYS = "stoker-api-keys"
"""Volume of the engines' API keys; its file is `keys`."""
API_KEYS_FOLDER = "/etc/stoker-api-keys"
TRANSFER_FOLDER = "/etc/stoker-transfer"
REPLICA_FOLDER = "/etc/stoker-replica"
REPLICA_PLACEHOLDER = "stoker-replica"
"""Name of the Secret with the key of replicas in a template; each EnginePool has its own."""
DISK_FOLDER = "/var/stoker/blocks"
STORE_FOLDER = "/var/stoker/store"
DISK_SLACK_BYTES = 64 * 2**20
"""Room of an emptyDir beyond its files, for folders and locks: a pod over its limit would be evicted."""


@dataclass(frozen=True)
class ModelSource:
    """Resolved weights of a revision: their place and their digest."""

    path: str
    """Path in the pod."""
    claim: str | None = None
    """Claim to mount for them."""
    digest: str | None = None
    buckets: BucketMounts = field(default_factory=BucketMounts)
    """Access to the bucket that they are in."""
    secret: str | None = None
    """Secret whose keys are variables of the client that fetches them."""

    @property
    def fetched(self) -> bool:
        """Whether engines fetch them into a cache."""
        return self.path.startswith(FETCHED_SCHEMES)


def checkpoint_source(storage: StorageSpec, default_path: str, folder: str, digest: str) -> ModelSource:
    path = f"{storage_root(storage, default_path)}/{folder}"
    return ModelSource(path, storage.claim_name, digest, bucket_mounts((storage, default_path)))


def uri_source(uri: str, secret: str | None = None) -> ModelSource:
    """Resolve `file:///PATH` of a volume that the user mounts, `pvc://CLAIM/PATH`, or what engines fetch.

    Raises:
        ValueError: another scheme.
    """
    if uri.startswith(FETCHED_SCHEMES):
        return ModelSource(uri, secret=secret)
    scheme, _, rest = uri.partition("://")
    if scheme == "file":
        return ModelSource(rest)
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        return ModelSource(f"{CHECKPOINT_FOLDER}/{path}".rstrip("/"), claim)
    raise ValueError(f"model.uri {scheme}:// is not supported; allowed: file, pvc, hf, s3, oci")


def engine_template(
    deployment: InferenceDeployment, pool: Pool, source: ModelSource, settings: Settings
) -> dict[str, Any]:
    """Render `EnginePool.spec.revisions[].template`."""
    return {
        "role": pool.role,
        "podsPerReplica": pool.pods_per_replica,
        "gracePeriodSeconds": pool.grace_period_seconds,
        **({"scheduling": pool.scheduling.to_wire()} if pool.scheduling is not None else {}),
        "config": _config(deployment, pool, source, settings),
        "pod": _pod_template(deployment, pool, source, settings),
    }


def revision_config_map(pool: EnginePool, resource: Object, revision: Revision) -> Object:
    """Render the configuration of one revision's engines."""
    config = {**revision.template.config}
    config["identity"] = {**config["identity"], "revision": revision.name}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata_of(resource, f"{pool.metadata.name}-{revision.name}", "engine", pool_labels(pool)),
        "data": {"config.json": json.dumps(config, indent=1, sort_keys=True)},
    }


def engine_service(pool: EnginePool, resource: Object, settings: Settings) -> Object:
    """Render the headless Service that gives each engine pod a name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata_of(resource, pool.metadata.name, "engine", pool_labels(pool)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector_of(pool),
            "ports": [{"name": "http", "port": settings.engine_port}],
        },
    }


def disruption_budget(pool: EnginePool, resource: Object, wanted: Mapping[str, int]) -> Object:
    """Render the budget by which at most one replica at a time may be evicted.

    An eviction takes one pod, and the others of its replica with it. With several pods the budget is a number of pods
    that must stay, because Kubernetes takes a number that may be missing as one of replicas (`/scale`).

    Args:
        wanted: replicas by revision.
    """
    sizes = {revision.name: revision.template.pods_per_replica for revision in pool.spec.revisions}
    pods = sum(number * sizes[name] for name, number in wanted.items())
    single = all(size == 1 for size in sizes.values())
    limit = {"maxUnavailable": 1} if single else {"minAvailable": max(pods - 1, 0)}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata_of(resource, pool.metadata.name, "engine", pool_labels(pool)),
        "spec": {**limit, "selector": {"matchLabels": selector_of(pool)}},
    }


def replica_name(pool: EnginePool, revision: Revision, index: int) -> str:
    """Return the name of a replica, which is that of its leader."""
    return f"{pool.metadata.name}-{revision.name}-{index}"


def engine_pods(
    pool: EnginePool,
    resource: Object,
    revision: Revision,
    index: int,
    settings: Settings,
    group: SchedulerGroup | None = None,
) -> tuple[Object, ...]:
    """Render the pods of one replica, the leader first.

    Args:
        group: for the scheduler that the replica is given to; None: the operator places it, or leaves it to Kubernetes.
    """
    name, size = replica_name(pool, revision, index), revision.template.pods_per_replica
    pods = [_engine_pod(pool, resource, revision, f"{name}-{rank}" if rank else name) for rank in range(size)]
    if size > 1:
        data = int(revision.template.config.get("parallelism", {}).get("data", 1))
        place = _ReplicaPlace(name, size, size // data if data > 1 else size)
        pods = [_in_replica(pod, pool, place, rank, settings) for rank, pod in enumerate(pods)]
    if group is not None:
        return tuple(_given(pod, group, rank, name) for rank, pod in enumerate(pods))
    if settings.places_gangs:
        return tuple(map(with_gate, pods) if is_placed(revision.template, settings) else pods)
    template = revision.template
    levels, gang = topology_of(template), gang_of_replica(template.pod, size, template.config)
    return tuple(kept_together(pod, levels, gang, rank, {REPLICA: name}) for rank, pod in enumerate(pods))


def topology_of(template: EngineTemplate) -> tuple[Level, ...]:
    """The levels that keep the pods of a replica together."""
    return levels_of(template.scheduling.topology if template.scheduling is not None else ())


def is_placed(template: EngineTemplate, settings: Settings) -> bool:
    """Whether the operator chooses the nodes of a replica. A single pod without wishes is left to the scheduler."""
    return settings.places_gangs and (template.pods_per_replica > 1 or bool(topology_of(template)))


def _given(pod: Object, group: SchedulerGroup, rank: int, replica: str) -> Object:
    """Return a pod that its scheduler starts with its group. Our gate holds it until its PodGroup exists."""
    labels = {**pod["metadata"]["labels"], SCHEDULER: group.scheduler, POD_GROUP: group.name}
    marked = {**pod, "metadata": {**pod["metadata"], "labels": labels}}
    found = for_scheduler(marked, group, rank, {REPLICA: replica})
    return found if group.scheduler == "kueue" else with_gate(found)


@dataclass(frozen=True)
class _ReplicaPlace:
    """A replica of several pods."""

    name: str
    size: int
    rank_pods: int
    """Pods of one data-parallel rank; 0 where each pod has several."""

    def labels(self, rank: int) -> dict[str, str]:
        """Labels of one of its pods."""
        labels = {REPLICA: self.name, REPLICA_PODS: str(self.size), NODE_RANK: str(rank)}
        return labels if self.rank_pods == self.size else {**labels, RANK_PODS: str(max(self.rank_pods, 1))}

    def meeting(self, rank: int) -> str:
        """The pod at which a pod meets others: the first of its data-parallel rank, or of the replica where a pod has
        whole ranks."""
        first = rank - rank % self.rank_pods if self.rank_pods > 1 else 0
        return f"{self.name}-{first}" if first else self.name


def _in_replica(pod: Object, pool: EnginePool, place: _ReplicaPlace, rank: int, settings: Settings) -> Object:
    """Return the pod with its place in a replica of several: labels, rendezvous, key."""
    labels = place.labels(rank)
    metadata = {**pod["metadata"], "labels": {**pod["metadata"]["labels"], **labels}}
    address = pod_address(place.meeting(rank), pool.metadata.name, pool.metadata.namespace)
    env = {"STOKER_NODE_RANK": str(rank), "MASTER_ADDR": address, "MASTER_PORT": str(settings.rendezvous_port)}
    main, *others = pod["spec"]["containers"]
    rendezvous = [{"name": key, "value": value} for key, value in env.items()]
    containers = [{**main, "env": [*main.get("env", ()), *rendezvous]}, *others]
    return {**pod, "metadata": metadata, "spec": {**with_replica_key(pod["spec"], pool), "containers": containers}}


def with_replica_key(spec: Mapping[str, Any], pool: EnginePool) -> dict[str, Any]:
    """Return a pod's spec of a template with the Secret of the pool in place of the placeholder."""
    volumes = [_with_secret(volume, replica_secret_name(pool)) for volume in spec.get("volumes", ())]
    return {**spec, "volumes": volumes}


def _with_secret(volume: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Replace the placeholder of the replica's key by the pool's Secret."""
    mine = volume.get("secret", {}).get("secretName") == REPLICA_PLACEHOLDER
    return {**volume, "secret": {"secretName": name}} if mine else volume


def _engine_pod(pool: EnginePool, resource: Object, revision: Revision, name: str) -> Object:
    """Render one pod of a replica."""
    template: Mapping[str, Any] = revision.template.pod
    own = metadata_of(resource, name, "engine", {**pool_labels(pool), "revision": revision.name})
    user = template.get("metadata", {})
    own["labels"] = {**user.get("labels", {}), **own["labels"]}
    if user.get("annotations"):
        own["annotations"] = user["annotations"]
    spec = {**template["spec"], "hostname": name, "subdomain": pool.metadata.name}
    spec["volumes"] = with_config_map(spec["volumes"], PLACEHOLDER, f"{pool.metadata.name}-{revision.name}")
    return {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": spec}


def engine_url(pod: Object, port: int) -> str:
    metadata = pod["metadata"]
    return f"http://{pod_address(metadata['name'], pod['spec']['subdomain'], metadata['namespace'])}:{port}"


def pool_labels(pool: EnginePool) -> dict[str, str]:
    labels = pool.metadata.labels
    return {name: labels[name] for name in (DEPLOYMENT, DEPLOYMENT_UID, POOL) if name in labels}


def selector_of(pool: EnginePool) -> dict[str, str]:
    """Return labels that all engine pods of the pool have, and no other pods."""
    labels = pool.metadata.labels
    return {DEPLOYMENT_UID: labels[DEPLOYMENT_UID], POOL: labels[POOL], ROLE: "engine"}


def leader_selector(pool: EnginePool) -> dict[str, str]:
    """Return labels of one pod of each replica, by which autoscalers count replicas."""
    several = any(revision.template.pods_per_replica > 1 for revision in pool.spec.revisions)
    return {**selector_of(pool), **({NODE_RANK: "0"} if several else {})}


def _pod_template(
    deployment: InferenceDeployment, pool: Pool, source: ModelSource, settings: Settings
) -> dict[str, Any]:
    pairs = [
        config_volume(PLACEHOLDER),
        keys_volume(settings),
        scratch_volume("stoker-work", WORK_FOLDER),
        scratch_volume("stoker-tmp", "/tmp"),
    ]
    if may_have_gpus(pool):
        pairs.append(scratch_volume("stoker-shm", "/dev/shm", "Memory"))
    if source.claim is not None:
        pairs.append(claim_volume(source.claim, read_only=True))
    if pool.role != "colocated":
        key_secret = {"name": "stoker-transfer", "secret": {"secretName": transfer_secret_name(deployment)}}
        pairs.append((key_secret, {"name": "stoker-transfer", "mountPath": TRANSFER_FOLDER, "readOnly": True}))
    if pool.pods_per_replica > 1:
        key_secret = {"name": "stoker-replica", "secret": {"secretName": REPLICA_PLACEHOLDER}}
        pairs.append((key_secret, {"name": "stoker-replica", "mountPath": REPLICA_FOLDER, "readOnly": True}))
    pairs += _block_volumes(deployment.spec.engine.cache)
    pairs += [*source.buckets.volumes, *fetch_volumes(source.fetched, source.secret, settings)]
    key = deployment.spec.engine.api.api_key_secret_ref
    if key is not None:
        items = [{"key": key.key, "path": "keys"}]
        secret = {"name": API_KEYS, "secret": {"secretName": key.name, "items": items}}
        pairs.append((secret, {"name": API_KEYS, "mountPath": API_KEYS_FOLDER, "readOnly": True}))
    program = PodProgram(
        image=pool.image or settings.runtime_image,
        command=[*settings.python, "-m", "stoker.engine", "--config", CONFIG_FILE],
        port=settings.engine_port,
        volumes=[volume for volume, _ in pairs],
        mounts=[mount for _, mount in pairs],
        grace_period_s=pool.grace_period_seconds,
        env={**source.buckets.env, **fetch_variables(source.fetched, source.secret)},
    )
    pod = render_pod({"name": PLACEHOLDER}, program, pool, settings)
    return {"metadata": {name: value for name, value in pod["metadata"].items() if name != "name"}, "spec": pod["spec"]}


def _block_volumes(cache: CacheSettings) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Render the volumes of the tiers below main memory."""
    pairs = [] if cache.disk is None else [_disk_volume(cache.disk)]
    for number, claim in enumerate(cache.store.claim_names if cache.store is not None else ()):
        volume = {"name": f"stoker-store-{number}", "persistentVolumeClaim": {"claimName": claim}}
        pairs.append((volume, {"name": volume["name"], "mountPath": f"{STORE_FOLDER}/{claim}"}))
    return pairs


def _disk_volume(disk: DiskSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Render the volume of the disk tier: the user's claim, or an emptyDir of limited size."""
    source: dict[str, Any] = {"emptyDir": {"sizeLimit": str(disk.bytes + disk.bytes // 20 + DISK_SLACK_BYTES)}}
    if disk.claim_name is not None:
        source = {"persistentVolumeClaim": {"claimName": disk.claim_name}}
    return {"name": "stoker-blocks", **source}, {"name": "stoker-blocks", "mountPath": DISK_FOLDER}


def _config(deployment: InferenceDeployment, pool: Pool, source: ModelSource, settings: Settings) -> dict[str, Any]:
    engine = deployment.spec.engine
    served = deployment.spec.model
    plain = engine.model_dump(mode="json", exclude_none=True)
    plain.pop("transfer", None)
    plain["cache"] |= _tiers_config(engine.cache)
    if engine.cache_events is not None:
        plain["cache_events"] = _cache_events_config(engine.cache_events)
    plain["scheduler"]["aging_s"] = plain["scheduler"].pop("aging_seconds")
    api = plain.pop("api")
    if api.pop("api_key_secret_ref", None) is not None:
        api["api_key_file"] = f"{API_KEYS_FOLDER}/keys"
    model = {"path": source.path, "names": list(served.names or (deployment.metadata.name,)), "dtype": served.dtype}
    if source.digest is not None:
        model["digest"] = source.digest
    if source.fetched:
        model["cache"] = MODEL_CACHE_FOLDER
    return {
        **plain,
        "device": device_of(engine.device, pool),
        "identity": {
            "namespace": deployment.metadata.namespace,
            "deployment": deployment.metadata.name,
            "pool": pool.name,
            "revision": "",
        },
        "listen": {
            "host": "0.0.0.0",
            "port": settings.engine_port,
            "control_keys": KEYS_FOLDER,
            "control_socket": f"{WORK_FOLDER}/control.sock",
        },
        "termination_log": TERMINATION_LOG,
        "work_dir": WORK_FOLDER,
        "model": model,
        "api": api,
        "parallelism": pool.parallelism.model_dump(mode="json"),
        "grace_period_s": pool.grace_period_seconds,
        **_role_config(deployment, pool, settings),
        **_replica_config(pool),
    }


def _tiers_config(cache: CacheSettings) -> dict[str, Any]:
    """Render the tiers below main memory."""
    tiers: dict[str, Any] = {}
    if cache.disk is not None:
        tiers["disk"] = {"path": DISK_FOLDER, "bytes": cache.disk.bytes}
    if cache.store is not None:
        own = cache.store
        paths = [f"{STORE_FOLDER}/{claim}" for claim in own.claim_names]
        tiers["store"] = {"paths": paths, "replicas": own.replicas, "bytes": own.bytes, "ttl_s": own.ttl_seconds}
    return tiers


def _cache_events_config(events: CacheEventSettings) -> dict[str, Any]:
    """Render the events of the prefix cache, which subscribers get at the pod's address."""
    config = events.model_dump(mode="json", exclude={"port", "replay_port"})
    config["endpoint"] = f"tcp://0.0.0.0:{events.port}"
    if events.replay_port is not None:
        config["replay_endpoint"] = f"tcp://0.0.0.0:{events.replay_port}"
    return config


def _replica_config(pool: Pool) -> dict[str, Any]:
    """Render the part of a replica of several pods; without it the configuration is as it was before there were any."""
    if pool.pods_per_replica == 1:
        return {}
    return {"replica": {"pods": pool.pods_per_replica, "key_file": f"{REPLICA_FOLDER}/key"}}


def _role_config(deployment: InferenceDeployment, pool: Pool, settings: Settings) -> dict[str, Any]:
    """Render the part of a pool with a role; a colocated pool's configuration is as it was before there were roles."""
    if pool.role == "colocated":
        return {}
    transfer = deployment.spec.engine.transfer or TransferSettings()
    own = {"listen": f"0.0.0.0:{settings.transfer_port}", "key_file": f"{TRANSFER_FOLDER}/key"}
    return {"role": pool.role, "transfer": {**transfer.model_dump(mode="json"), **own}}
