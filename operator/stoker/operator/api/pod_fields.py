"""The part of a pod that a user may choose. A curated subset of Kubernetes' pod (its whole schema is half a megabyte) plus `podTemplate`,
a patch that is merged last and passed on unseen."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from stoker.operator.api.metadata import KeyRef, LocalRef
from stoker.operator.api.value import (
    Int32,
    Int64,
    Label,
    Name,
    Opaque,
    Path,
    Quantity,
    StringMap,
    Value,
    exactly_one,
    list_map,
    rule,
    rules,
)

Quantities = Annotated[dict[Annotated[str, Field(max_length=317)], Quantity], Field(max_length=16)]
Image = Annotated[str, Field(max_length=512, pattern=r"^[^\s]+$")]


class ResourceRequirements(Value):
    """What the main container asks for. GPUs are asked for with `gpusPerPod`."""

    requests: Quantities | None = None
    limits: Quantities | None = None


class FieldRef(Value):
    field_path: Annotated[str, Field(min_length=1, max_length=253)]


class EnvSource(Value):
    """Where a variable's value comes from."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("secretKeyRef", "configMapKeyRef", "fieldRef")))

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None
    field_ref: FieldRef | None = None


class EnvVar(Value):
    """One environment variable."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!(has(self.value) && has(self.valueFrom))", "value and valueFrom cannot be given together"),
            rule(
                "!self.name.startsWith('STOKER_') && !(self.name in ['MASTER_ADDR', 'MASTER_PORT', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES'])",
                "this variable belongs to Stoker",
                shown="{self.name} is set by Stoker and cannot be given",
                field=".name",
                reason="FieldValueForbidden",
            ),
        )
    )

    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
    value: Annotated[str, Field(max_length=4096)] | None = None
    value_from: EnvSource | None = None


class EnvFrom(Value):
    """All keys of a Secret or ConfigMap as variables."""

    model_config = ConfigDict(json_schema_extra=rules(exactly_one("secretRef", "configMapRef")))

    prefix: Annotated[str, Field(max_length=64)] | None = None
    secret_ref: LocalRef | None = None
    config_map_ref: LocalRef | None = None


class KeyToPath(Value):
    key: Annotated[str, Field(min_length=1, max_length=253)]
    path: Path


KeysToPaths = Annotated[
    tuple[KeyToPath, ...], Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"})
]


class ConfigMapVolume(Value):
    name: Name
    items: KeysToPaths | None = None
    optional: bool | None = None


class SecretVolume(Value):
    secret_name: Name
    items: KeysToPaths | None = None
    optional: bool | None = None


class ClaimVolume(Value):
    claim_name: Name
    read_only: bool | None = None


class EmptyDirVolume(Value):
    medium: Literal["", "Memory"] | None = None
    size_limit: Quantity | None = None


class HostPathVolume(Value):
    path: Path
    type: Literal["", "Directory", "DirectoryOrCreate", "File"] | None = None


class Volume(Value):
    """One volume. Other sources: through `podTemplate`."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            exactly_one("configMap", "secret", "persistentVolumeClaim", "emptyDir", "hostPath"),
            rule(
                "!self.name.startsWith('stoker-')",
                "names that start with stoker- belong to Stoker",
                field=".name",
                reason="FieldValueForbidden",
            ),
        )
    )

    name: Label
    config_map: ConfigMapVolume | None = None
    secret: SecretVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyDirVolume | None = None
    host_path: HostPathVolume | None = None


class VolumeMount(Value):
    """Where a volume appears in the main container."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!['/etc/stoker', '/var/stoker', '/dev/termination-log'].exists(taken, self.mountPath == taken || self.mountPath.startsWith(taken + '/')) && !self.mountPath.startsWith('/etc/stoker-keys')",
                "this path belongs to Stoker",
                shown="{self.mountPath} belongs to Stoker: mount below another path",
                field=".mountPath",
                reason="FieldValueForbidden",
            )
        )
    )

    name: Label
    mount_path: Annotated[str, Field(min_length=2, max_length=512, pattern=r"^/[^:]+$")]
    sub_path: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    read_only: bool | None = None


class Toleration(Value):
    key: Annotated[str, Field(max_length=317)] | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: Annotated[str, Field(max_length=63)] | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: Int64 | None = None


class SmallPod(Value):
    """What may be chosen for a pod without accelerators: router, task."""

    image: Image | None = None
    """Default: the operator's own image for this program, pinned by digest."""
    image_pull_secrets: Annotated[tuple[LocalRef, ...], Field(max_length=8, json_schema_extra=list_map("name"))] = ()
    service_account_name: Name | None = None
    """Default: the namespace's `default`; its token is not mounted."""
    resources: ResourceRequirements = ResourceRequirements()
    node_selector: StringMap = Field(default_factory=dict)
    tolerations: Annotated[
        tuple[Toleration, ...], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = ()
    priority_class_name: Name | None = None
    pod_template: Opaque | None = None
    """`{metadata: {labels, annotations}, spec}`, merged last (strategic merge)."""


def ranks_per_pod(section: str) -> str:
    """CEL: processes in one pod, where `section` has the pod's fields."""
    return (
        f"(has({section}.ranksPerPod) ? {section}.ranksPerPod : ({section}.gpusPerPod > 0 ? {section}.gpusPerPod : 1))"
    )


POD_RULES = (
    rule(
        "!has(self.volumeMounts) || has(self.podTemplate)"
        " || self.volumeMounts.all(mount, has(self.volumes) && self.volumes.exists(volume, volume.name == mount.name))",
        "every volumeMount needs a volume of its name",
        shown="no volume is named {self.volumeMounts.filter(mount, !has(self.volumes) || !self.volumes.exists(volume, volume.name == mount.name))[0].name}",
        field=".volumeMounts",
    ),
    rule(
        "!has(self.resources) || ((!has(self.resources.limits) || !('nvidia.com/gpu' in self.resources.limits))"
        " && (!has(self.resources.requests) || !('nvidia.com/gpu' in self.resources.requests)))",
        "GPUs are asked for with gpusPerPod",
        field=".resources",
    ),
)


class PodFields(SmallPod):
    """What may be chosen for a pod that does the work: trainer, engine."""

    gpus_per_pod: Annotated[int, Field(ge=0, le=64)] = 0
    ranks_per_pod: Annotated[int, Field(ge=1, le=256)] | None = None
    """Processes in one pod; default: `gpusPerPod`, or 1 without GPUs."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64, json_schema_extra=list_map("name"))] = ()
    env_from: Annotated[
        tuple[EnvFrom, ...], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = ()
    volumes: Annotated[tuple[Volume, ...], Field(max_length=32, json_schema_extra=list_map("name"))] = ()
    volume_mounts: Annotated[
        tuple[VolumeMount, ...], Field(max_length=32, json_schema_extra=list_map("mountPath"))
    ] = ()
    grace_period_seconds: Annotated[int, Field(ge=1, le=86400)] = 60
    """From SIGTERM to SIGKILL: a trainer saves, an engine finishes its requests within it."""

    @property
    def ranks(self) -> int:
        """Processes in one pod."""
        return self.ranks_per_pod or max(self.gpus_per_pod, 1)


class PodCounts(Value):
    """Pods of the running attempt or revision."""

    desired: Int32 = 0
    scheduled: Int32 = 0
    running: Int32 = 0
    ready: Int32 = 0


class Runtime(Value):
    """Device and kernels, chosen once at start."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "reference", "fused"] = "auto"
    attention: Literal["auto", "stoker", "flash", "cudnn", "sdpa"] = "auto"
