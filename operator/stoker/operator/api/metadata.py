"""The parts that every object of the API has besides its spec: identity, ownership, conditions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from stoker.operator.api.value import Int64, Label, Name, Opaque, Text, Time, Uid, Value, list_map

GROUP = "stoker.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"


class OwnerReference(Value):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool = False
    block_owner_deletion: bool = False


class ObjectMeta(Value):
    """Kubernetes metadata, as far as the operator reads it; its schema is Kubernetes' own and not in the CRDs."""

    name: str = ""
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    finalizers: tuple[str, ...] = ()
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()


class LocalRef(Value):
    """Object of the same namespace."""

    name: Name


class JobRef(Value):
    """TrainingJob of the same namespace."""

    name: Label
    uid: Uid | None = None
    """If given, a later job of the same name does not count."""


class KeyRef(Value):
    """Key of a Secret or ConfigMap of the same namespace."""

    name: Name
    key: Annotated[str, Field(max_length=253, pattern=r"^[-.\w]+$")]


class StatusCondition(Value):
    """One observation, in the form that kstatus, Argo CD and Flux read."""

    type: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z]+$")]
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    message: Annotated[str, Field(max_length=4096)] = ""
    last_transition_time: Time
    observed_generation: Int64 | None = None


class Status(Value):
    """The first fields of every status."""

    conditions: Annotated[tuple[StatusCondition, ...], Field(max_length=16, json_schema_extra=list_map("type"))] = ()
    """`Ready`; `Reconciling` and `Stalled` while they hold; the kind's own."""
    observed_generation: Int64 | None = None
    message: Text | None = None
    """Why it is not running, in one line: `WaitingForGPUs 3 of 8`, `LoadingWeights 43 %`."""


class EditableStatus(Status):
    """Status of a kind whose spec a user may edit while it is in use."""

    accepted_spec: Opaque | None = None
    """The last spec that this version can carry out, in force while a later edit is refused."""


class Resource(Value):
    """Base of the kinds."""

    api_version: Literal["stoker.dev/v1alpha1"] = "stoker.dev/v1alpha1"
    metadata: ObjectMeta = ObjectMeta()

    @property
    def deleting(self) -> bool:
        return self.metadata.deletion_timestamp is not None


R = TypeVar("R", bound=Resource)


def read(cls: type[R], found: Mapping[str, Any]) -> R:
    """Return a typed view of a stored object, without fields of a newer version. Admission has checked the object.

    Raises:
        pydantic.ValidationError: the object does not fit the schema.
    """
    return cls.model_validate(found)
