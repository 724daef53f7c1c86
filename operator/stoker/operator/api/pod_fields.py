"""The part of a pod that a user may choose: a curated subset of Kubernetes' pod, plus `podTemplate`.

The whole schema of a pod is half a megabyte. `podTemplate` is a patch that is merged last and passed on unseen.
"""

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
    """Requests and limits without GPUs, which `gpusPerPod` counts."""

    requests: Quantities | None = None
    limits: Quantities | None = None


class FieldRef(Value):
    field_path: Annotated[str, Field(min_length=1, max_length=253)]


class EnvKeyRef(KeyRef):
    """Key of a Secret or ConfigMap of the same namespace; without it the variable is left out if `optional`."""

    optional: bool | None = None


class EnvSource(Value):
    model_config = ConfigDict(json_schema_extra=rules(exactly_one("secretKeyRef", "configMapKeyRef", "fieldRef")))

    secret_key_ref: EnvKeyRef | None = None
    config_map_key_ref: EnvKeyRef | None = None
    field_ref: FieldRef | None = None


class EnvVar(Value):
    """Environment variable of the main container."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!(has(self.value) && has(self.valueFrom))", "value and valueFrom cannot be given together"),
            rule(
                "!self.name.matches('^(STOKER_.*|MASTER_(ADDR|PORT)|(LOCAL_)?RANK|WORLD_SIZE|CUDA_VISIBLE_DEVICES)$')",
                "the variable is set by Stoker and cannot be given",
                shown="{self.name} is set by Stoker and cannot be given",
                field=".name",
                reason="FieldValueForbidden",
            ),
        )
    )

    name: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z_]\w*$")]
    value: Annotated[str, Field(max_length=4096)] | None = None
    value_from: EnvSource | None = None


class EnvFrom(Value):
    """Secret or ConfigMap whose keys all become variables."""

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
    """Volume of the pod; other sources are possible through `podTemplate`."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            exactly_one("configMap", "secret", "persistentVolumeClaim", "emptyDir", "hostPath"),
            rule(
                "!self.name.startsWith('stoker-')",
                "names that start with stoker- are reserved for Stoker",
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
    """Path of a volume in the main container."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!self.mountPath.matches('^/(etc/stoker|var/stoker|dev/termination-log)(/|$)|^/etc/stoker-keys')",
                "this path is reserved for Stoker",
                shown="{self.mountPath} is reserved for Stoker: mount below another path",
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
    """Choices for a pod without accelerators: router, task."""

    image: Image | None = None
    """Container image; default: the image of this installation."""
    image_pull_secrets: Annotated[tuple[LocalRef, ...], Field(max_length=8, json_schema_extra=list_map("name"))] = ()
    service_account_name: Name | None = None
    """ServiceAccount of the pods; its token is not mounted."""
    resources: ResourceRequirements = ResourceRequirements()
    node_selector: StringMap = Field(default_factory=dict)
    tolerations: Annotated[
        tuple[Toleration, ...], Field(max_length=16, json_schema_extra={"x-kubernetes-list-type": "atomic"})
    ] = ()
    priority_class_name: Name | None = None
    pod_template: Opaque | None = None
    """Patch `{metadata, spec}` of the rendered pod (strategic merge)."""


def ranks_per_pod(section: str) -> str:
    """CEL: processes in one pod, where `section` has the pod's fields."""
    return f"(has({section}.ranksPerPod) ? {section}.ranksPerPod : {section}.gpusPerPod > 0 ? {section}.gpusPerPod : 1)"


POD_RULES = (
    rule(
        "!has(self.volumeMounts) || has(self.podTemplate)"
        " || self.volumeMounts.all(m, has(self.volumes) && self.volumes.exists(v, v.name == m.name))",
        "every volumeMount needs a volume of its name",
        shown="no volume is named"
        " {self.volumeMounts.filter(m, !has(self.volumes) || !self.volumes.exists(v, v.name == m.name))[0].name}",
        field=".volumeMounts",
    ),
    rule(
        "!has(self.resources) || !(has(self.resources.limits) && 'nvidia.com/gpu' in self.resources.limits"
        " || has(self.resources.requests) && 'nvidia.com/gpu' in self.resources.requests)",
        "GPUs belong into gpusPerPod",
        field=".resources",
    ),
)


class PodFields(SmallPod):
    """Choices for a pod that computes: trainer, engine."""

    gpus_per_pod: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs of one pod (`nvidia.com/gpu`); 0 computes on the CPU."""
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
    """Time from SIGTERM to SIGKILL: a trainer saves, an engine finishes its requests."""

    @property
    def ranks(self) -> int:
        """Processes in one pod."""
        return self.ranks_per_pod or max(self.gpus_per_pod, 1)


class PodCounts(Value):
    """Numbers of pods of the running attempt."""

    desired: Int32 = 0
    scheduled: Int32 = 0
    running: Int32 = 0
    ready: Int32 = 0


class Runtime(Value):
    """Device and kernels, chosen when the program starts."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; `auto`: `cuda` with GPUs, else `cpu`."""
    kernels: Literal["auto", "reference", "fused"] = "auto"
    """`fused` (Triton) or `reference` (PyTorch); `auto`: `fused` on CUDA."""
    attention: Literal["auto", "stoker", "flash", "cudnn", "sdpa"] = "auto"
    """Attention; `auto`: the fastest that kernels and precision allow."""
