"""The input and the result of a reconcile: `Observed` and `Plan`. Plain values, no I/O.

The executor carries a plan out in the order of its fields and stops at the first failure, except at a refused pod.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.operator.domain.autoscaling.record import PoolScaling
from stoker.operator.domain.lost_nodes import Outage
from stoker.operator.domain.placement.device_catalog import DeviceCatalog
from stoker.operator.domain.placement.node_capacity import NodeCapacity
from stoker.operator.domain.queue.applicant import Turn

Object = dict[str, Any]
"""A Kubernetes object as plain JSON data."""


class Key(NamedTuple):
    """Identity of a resource by name."""

    kind: str
    namespace: str
    name: str


class Ref(NamedTuple):
    """Identity of one exact object: the uid tells it from a later object of the same name."""

    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class ControlCall:
    """A signed control call to a pod. Idempotent by the `id` in its body."""

    pod: Ref
    method: str
    path: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event about the reconciled resource."""

    type: str
    """`Normal` or `Warning`."""
    reason: str
    message: str


@dataclass(frozen=True)
class Scale:
    """A write of `/scale`."""

    ref: Ref
    replicas: int


@dataclass(frozen=True)
class Patch:
    """A later write to a pod: scheduling gates, the affinity of a pod that is still gated, labels. JSON merge patch."""

    ref: Ref
    body: Mapping[str, Any]
    requests: Mapping[str, int] = field(default_factory=dict)
    """Of a pod that the patch pins to a node, so that its room counts as taken from now on."""


@dataclass(frozen=True)
class Plan:
    """The changes that one pass asks for. The default changes nothing."""

    finalizers: tuple[str, ...] | None = None
    """The whole list on the resource itself; None leaves it. Added finalizers are written first, removed ones last."""
    status: Object | None = None
    """The whole new status; None when it is right already.

    It is written before any child is touched, so that a cause survives a crash.
    """
    generate: tuple[Object, ...] = ()
    """Secrets that get a random key, under `data.key`: by POST. One of that name that exists counts as done, and is
    never read."""
    create: tuple[Object, ...] = ()
    """Pods, Checkpoints, EnginePools: by POST. An existing object of that name with our owner uid counts as done."""
    apply: tuple[Object, ...] = ()
    """Other children, by server-side apply; skipped when the label with the applied hash matches."""
    patch: tuple[Patch, ...] = ()
    scale: tuple[Scale, ...] = ()
    delete: tuple[Ref, ...] = ()
    force_delete: tuple[Ref, ...] = ()
    """Pods that are removed without waiting for their end, because their node is lost."""
    calls: tuple[ControlCall, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after_s: float | None = None

    @property
    def empty(self) -> bool:
        """Nothing to change (a requeue alone changes nothing)."""
        return self == Plan(requeue_after_s=self.requeue_after_s)


Report = Mapping[str, Any]
"""The newest answer of a pod's `/status`. A failed poll leaves the old answer: it is never a hang."""


@dataclass(frozen=True)
class Observed:
    """The input of a reconcile: the resource, the objects around it, the pods' reports. Read-only data."""

    resource: Object
    objects: Mapping[str, tuple[Object, ...]] = field(default_factory=dict)
    """Objects by kind: owned children, and what the resource refers to (Checkpoints, PersistentVolumeClaims, ...)."""
    reports: Mapping[str, Report] = field(default_factory=dict)
    """Newest reports by pod uid."""
    namespace_terminating: bool = False
    """Whether the resource's namespace is being deleted, so that the cluster takes nothing new into it."""
    lost_pods: tuple[Ref, ...] = ()
    """Pods that were running on lost nodes. In `objects` they have failed."""
    next_loss_s: float | None = None
    """Seconds until the next silent node with a pod counts as lost."""
    outage: Outage | None = None
    """The outage that keeps pods of the resource from counting as lost."""
    refusal: str | None = None
    """The cluster's answer when it refused the last pass; None when it accepted that pass."""
    nodes: tuple[NodeCapacity, ...] | None = None
    """Nodes and what they have left, without what the resource's own pods take; given while some of those are gated,
    and None for an installation without a view of nodes."""
    devices: DeviceCatalog | None = None
    """The devices of these nodes that pods may claim; None where the operator does not see them."""
    turn: Turn | None = None
    """What the queue says to a gang that waits; None: it waits for no other. `nodes` are then those it may use."""

    scaling: Mapping[str, PoolScaling] = field(default_factory=dict)
    """The autoscaler's decisions about a deployment's pools, by pool."""

    def of_kind(self, kind: str) -> tuple[Object, ...]:
        return self.objects.get(kind, ())
