"""The executor of plans: the order of their fields is the order of its writes. It decides nothing.

It stops at the first failure, except where the cluster refuses a pod, or a Service or policy around pods: that is told
when the rest of the plan is done, and no finalizer is removed. Every step may be repeated after a crash at any point:
an object of the same name that is ours counts as created, a child with the wanted hash as applied, an object that is
gone as deleted. Answers are written through to the store.

Called by the loop's workers and by `public_keys`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar

from stoker.operator.cluster.interface import (
    AlreadyExists,
    Cluster,
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NamespaceTerminating,
    NameTaken,
    NotFound,
)
from stoker.operator.cluster.kinds import FOREIGN
from stoker.operator.domain.applied_hash import is_applied, with_applied_hash
from stoker.operator.domain.clock import Clock, timestamp
from stoker.operator.domain.labels import CHECKPOINT_UID, DEPLOYMENT_UID, JOB_UID, ROLE
from stoker.operator.domain.plan import ControlCall, Event, Key, Object, Plan, Ref
from stoker.operator.domain.text import shortened
from stoker.operator.loop.store import Store, key_of

log = logging.getLogger(__name__)

MANAGER = "stoker-operator"
EVENT_WINDOW_S = 600
"""An event about an object is written once in this time."""

LARGEST_BATCH = 256
"""Objects made at the same time. Batches begin with one object and double, so that a refusal costs one request."""

_REFUSALS = (Forbidden, Invalid, NameTaken)
_AROUND_PODS = ("Service", "NetworkPolicy", "PodDisruptionBudget")
"""Children without which pods that exist go on, and can be drained and deleted."""

T = TypeVar("T")


class PlanExecutor:
    """The only writer of the operator."""

    def __init__(
        self, cluster: Cluster, store: Store, clock: Clock, *, max_requests: int = 32,
        new_key: Callable[[], str] = lambda: secrets.token_hex(32),
    ) -> None:  # fmt: skip
        self.cluster = cluster
        self.store = store
        self.clock = clock
        self.new_key = new_key
        """Draws the key of a Secret."""
        self._slots = asyncio.Semaphore(max_requests)

    async def execute(self, resource: Object, plan: Plan) -> None:
        """Do all of `plan` about `resource`.

        Raises:
            ClusterError: a refusal that stops nothing, else the first failure, after which nothing was tried.
        """
        resource = await self._add_finalizers(resource, plan)
        resource = await self._status(resource, plan)
        for body in plan.generate:
            await self._generate(body)
        refusal = await self._create_all(plan)
        try:
            refusal = await self._change_children(resource, plan) or refusal
        except ClusterError as error:
            raise refusal or error from error
        if refusal is not None:
            raise refusal
        await self._remove_finalizers(resource, plan)

    async def _create_all(self, plan: Plan) -> ClusterError | None:
        """Make the new objects, pods last. Return the refusal of a pod, which stops nothing else of the plan.

        The quota that refuses it may be held by pods which the plan drains or deletes.
        """
        pods = [body for body in plan.create if body["kind"] == "Pod"]
        await self._in_batches(self._create, [body for body in plan.create if body["kind"] != "Pod"])
        try:
            await self._in_batches(self._create, pods)
        except _REFUSALS as refusal:
            return refusal
        return None

    async def _apply_all(self, bodies: Iterable[Object]) -> ClusterError | None:
        """Apply children in their order. Return the refusal of one around pods, for which those behind it wait."""
        for body in bodies:
            try:
                await self.apply(body)
            except _REFUSALS as refusal:
                if body["kind"] not in _AROUND_PODS:
                    raise
                return refusal
        return None

    async def _change_children(self, resource: Object, plan: Plan) -> ClusterError | None:
        """Do what follows the creates. Return the refusal of a child around pods; pods are patched without one only."""
        refusal = await self._apply_all(plan.apply)
        for patch in plan.patch if refusal is None else ():
            self.store.put(await self._limited(self.cluster.patch(patch.ref, patch.body)))
        for scale in plan.scale:
            await self._limited(self.cluster.scale(scale.ref, scale.replicas))
        await self._in_batches(self._delete, plan.delete)
        await self._in_batches(self._remove, plan.force_delete)
        await _all(map(self._call, plan.calls))
        for event in plan.events:
            await self.record(resource, event)
        return refusal

    async def record(self, resource: Object, event: Event) -> None:
        """Write an Event. Where the cluster takes none, the work goes on."""
        try:
            await self._limited(self.cluster.create(event_object(resource, event, self.clock.now())))
        except AlreadyExists:
            return
        except ClusterError as error:
            log.warning("event %s about %s was not written: %s", event.reason, "/".join(key_of(resource)), error)

    async def _add_finalizers(self, resource: Object, plan: Plan) -> Object:
        held = tuple(resource["metadata"].get("finalizers") or ())
        missing = tuple(name for name in plan.finalizers or () if name not in held)
        return await self._write_finalizers(resource, [*held, *missing]) if missing else resource

    async def _remove_finalizers(self, resource: Object, plan: Plan) -> None:
        held = tuple(resource["metadata"].get("finalizers") or ())
        kept = [name for name in held if plan.finalizers is None or name in plan.finalizers]
        if len(kept) != len(held):
            await self._write_finalizers(resource, kept)

    async def _write_finalizers(self, resource: Object, finalizers: list[str]) -> Object:
        metadata = {"finalizers": finalizers, "resourceVersion": resource["metadata"]["resourceVersion"]}
        written = await self._limited(self.cluster.patch(ref_of(resource), {"metadata": metadata}))
        self.store.put(written)
        return written

    async def _status(self, resource: Object, plan: Plan) -> Object:
        if plan.status is None or plan.status == resource.get("status"):
            return resource
        version = resource["metadata"]["resourceVersion"]
        written = await self._limited(
            self.cluster.update_status(ref_of(resource), plan.status, resource_version=version)
        )
        self.store.put(written)
        return written

    async def _in_batches(self, act: Callable[[T], Awaitable[None]], given: Sequence[T]) -> None:
        """Act on all items, in batches that double in size.

        Raises:
            Exception: the first failure of a batch, when that batch is over.
        """
        begin, size = 0, 1
        while begin < len(given):
            batch = given[begin : begin + size]
            if len(batch) == 1:
                await act(batch[0])
            else:
                await _all(map(act, batch))
            begin, size = begin + size, min(2 * size, LARGEST_BATCH)

    async def _create(self, body: Object) -> None:
        namespace = body["metadata"].get("namespace", "")
        try:
            created = await self._limited(self.cluster.create(body))
            self.store.set_terminating(namespace, None)
        except NamespaceTerminating:
            self.store.set_terminating(namespace, self.clock.monotonic())
            raise
        except AlreadyExists:
            created = await self._ours(body)
        self.store.put(created)

    async def _generate(self, body: Object) -> None:
        """Make a Secret with a random key. The operator may create Secrets, not read them."""
        key = base64.b64encode(self.new_key().encode()).decode()
        with contextlib.suppress(AlreadyExists):
            await self._limited(self.cluster.create({**body, "data": {"key": key}}))

    async def apply(self, body: Object) -> None:
        """Apply an object, unless the wanted hash is there already.

        Server-side apply takes over any object of that name, so names that people may also use are looked up first.
        """
        if body["kind"] in FOREIGN:
            await self._limited(self.cluster.apply(with_applied_hash(body), manager=MANAGER))
            return
        known = self.store.get(_key(body))
        if is_applied(body, known):
            return
        if known is None and _may_be_taken(body):
            with contextlib.suppress(NotFound):
                await self._ours(body)
        self.store.put(await self._limited(self.cluster.apply(with_applied_hash(body), manager=MANAGER)))

    async def _ours(self, body: Object) -> Object:
        """The existing object with the name of `body`.

        Raises:
            NotFound: there is none.
            NameTaken: it is not ours.
        """
        live = await self._limited(self.cluster.get(*_key(body)))
        if not is_ours(live, body):
            raise NameTaken(f"{body['kind']} {'/'.join(_key(body)[1:])} exists and belongs to another owner")
        return live

    async def discard(self, resource: Object) -> None:
        """Delete an object that is not needed any more."""
        await self._delete(ref_of(resource))

    async def _call(self, call: ControlCall) -> None:
        """Send one control call. Calls run side by side, so a pod that does not answer delays no other."""
        await self._limited(self.cluster.call(call))

    async def _remove(self, ref: Ref) -> None:
        await self._delete(ref, grace_s=0)

    async def _delete(self, ref: Ref, grace_s: int | None = None) -> None:
        try:
            left = await self._limited(self.cluster.delete(ref, grace_s=grace_s))
        except (NotFound, Conflict):  # gone already, or replaced by another object of that name
            left = None
        if left is None:
            self.store.remove(Key(ref.kind, ref.namespace, ref.name), ref.uid)
        else:
            self.store.put(left)

    async def _limited(self, request: Awaitable[T]) -> T:
        async with self._slots:
            return await request


async def _all(acts: Iterable[Awaitable[None]]) -> None:
    """Wait for all of them, then raise the first failure."""
    for result in await asyncio.gather(*acts, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def ref_of(resource: Object) -> Ref:
    return Ref(*key_of(resource), resource["metadata"]["uid"])


def is_ours(live: Object, wanted: Object) -> bool:
    """Whether an object was made for the same owner, by its owner references or by our uid labels."""
    owners = {owner["uid"] for owner in live["metadata"].get("ownerReferences") or ()}
    wanted_owners = {owner["uid"] for owner in wanted["metadata"].get("ownerReferences") or ()}
    if wanted_owners:
        return wanted_owners <= owners
    labels = live["metadata"].get("labels") or {}
    wanted_labels = wanted["metadata"].get("labels") or {}
    marks = [label for label in (JOB_UID, DEPLOYMENT_UID, CHECKPOINT_UID) if label in wanted_labels]
    return bool(marks) and all(labels.get(label) == wanted_labels[label] for label in marks)


def _may_be_taken(body: Object) -> bool:
    """Whether a person may have given the same name: Services and budgets are named after a deployment."""
    role = (body["metadata"].get("labels") or {}).get(ROLE)
    return body["kind"] in ("Service", "PodDisruptionBudget") and role != "trainer"


def event_object(resource: Object, event: Event, now: datetime) -> Object:
    """The core/v1 Event.

    Its name follows from its content and the time window, so that a repetition is the same object.
    """
    metadata = resource["metadata"]
    window = int(now.timestamp()) // EVENT_WINDOW_S
    content = "\n".join((metadata["uid"], event.type, event.reason, event.message, str(window)))
    about = {name: metadata[name] for name in ("name", "namespace", "uid") if name in metadata}
    moment = timestamp(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{metadata['name'][:200].rstrip('-.')}.{hashlib.sha256(content.encode()).hexdigest()[:16]}",
            "namespace": metadata.get("namespace", "default"),
        },
        "involvedObject": {"apiVersion": resource["apiVersion"], "kind": resource["kind"], **about},
        "type": event.type,
        "reason": event.reason,
        "message": shortened(event.message),
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
        "reportingInstance": MANAGER,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": 1,
    }


def _key(body: Object) -> Key:
    metadata = body["metadata"]
    return Key(body["kind"], metadata.get("namespace", ""), metadata["name"])
