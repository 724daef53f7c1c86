"""The object store of the embedded cluster: the API server's rules without the network.

Resource versions, generations, status apart from spec, finalizers with deletion in two steps, owner references, and the history
that watches read. Stored objects are never changed in place. Not thread-safe: one event loop uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol

from stoker.operator.cluster.interface import AlreadyExists, Conflict, Gone, Invalid, NotFound
from stoker.operator.cluster.kinds import KINDS
from stoker.operator.cluster.local.builtin import admit_builtin, check_identity
from stoker.operator.cluster.local.merge import Intent, apply_merge, merge_patch
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.plan import Key, Object, Ref

HISTORY = 5000
"""Changes that a watch can look back."""
MAX_EVENTS = 1000
"""Event objects kept; the oldest go."""
DEFAULT_GRACE_S = 30

Admit = Callable[[Object, Object | None], Object]
"""(new, old) -> the object with defaults and without unknown fields; raises Invalid."""


@dataclass(frozen=True)
class Record:
    """One change in the history."""

    version: int
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Object


class Keeper(Protocol):
    """Where objects survive the process."""

    def load(self) -> Iterator[tuple[Object, dict[str, Intent]]]: ...

    def save(self, resource: Object, intents: Mapping[str, Intent]) -> None: ...

    def drop(self, key: Key) -> None: ...


class Forgetful:
    """Keeps nothing."""

    def load(self) -> Iterator[tuple[Object, dict[str, Intent]]]:
        return iter(())

    def save(self, resource: Object, intents: Mapping[str, Intent]) -> None:
        """Nothing."""

    def drop(self, key: Key) -> None:
        """Nothing."""


class ObjectStore:
    """All objects of one cluster."""

    def __init__(
        self,
        *,
        now: Callable[[], datetime],
        new_uid: Callable[[], str],
        admit: Admit | None = None,
        keeper: Keeper | None = None,
        history: int = HISTORY,
    ) -> None:
        self.now = now
        self.new_uid = new_uid
        self.admit = admit or (lambda new, _: new)
        self.keeper = keeper or Forgetful()
        self.listeners: list[Callable[[Record], None]] = []
        self.version = 0
        self._objects: dict[Key, Object] = {}
        self._intents: dict[Key, dict[str, Intent]] = {}
        self._uids: set[str] = set()
        self._dependents: dict[str, set[Key]] = {}
        self._events: deque[Key] = deque()
        self._history: deque[Record] = deque(maxlen=history)
        self._load()

    # Reading

    def find(self, key: Key) -> Object | None:
        return self._objects.get(key)

    def get(self, key: Key) -> Object:
        """Raises NotFound."""
        found = self._objects.get(key)
        if found is None:
            raise NotFound(f"{key.kind} {key.namespace}/{key.name} does not exist")
        return found

    def of_kind(self, kind: str, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """In the order of their names."""
        if kind not in KINDS:
            raise NotFound(f"no kind {kind!r}")
        keys = sorted(key for key in self._objects if key.kind == kind and namespace in (None, key.namespace))
        return [self._objects[key] for key in keys if matches(self._objects[key], labels)]

    def since(self, version: int) -> list[Record]:
        """Changes after `version`, oldest first.

        Raises:
            Gone: the history does not reach so far back.
        """
        if version < self._oldest():
            raise Gone(f"version {version} is too old, the oldest is {self._oldest()}")
        return [record for record in self._history if record.version > version]

    def forget_history(self) -> None:
        """A new watch from any earlier version fails from now on, as after a compaction."""
        self._history.clear()
        self.version += 1

    # Writing

    def create(self, body: Object, *, manager: str | None = None) -> Object:
        """Raises AlreadyExists, Invalid."""
        body = _with_namespace(body)
        check_identity(body)
        key = _key(body)
        if key in self._objects:
            raise AlreadyExists(f"{key.kind} {key.namespace}/{key.name} exists already")
        metadata = {name: body["metadata"][name] for name in _USER_METADATA if body["metadata"].get(name)}
        metadata |= {"uid": self.new_uid(), "creationTimestamp": timestamp(self.now()), "generation": 1}
        created = {**body, "metadata": metadata}
        if KINDS[key.kind].status:
            created.pop("status", None)
        created = self._admitted(created, None)
        if key.kind == "Pod":
            created["status"] = {"phase": "Pending"}
        self._intents[key] = {manager: _intent(body)} if manager else {}
        written = self._write("ADDED", created)
        self._note_event(key)
        self._collect_orphan(written)
        return written

    def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        """JSON merge patch on everything but status. Raises NotFound, Conflict, Invalid."""
        old = self._current(ref, str((body.get("metadata") or {}).get("resourceVersion") or "") or None)
        return self._update(old, merge_patch(old, {**body, "metadata": {**(body.get("metadata") or {})}}))

    def apply(self, body: Object, manager: str) -> Object:
        """Server-side apply. Raises Conflict on another uid, Invalid."""
        body = _with_namespace(body)
        check_identity(body)
        key = _key(body)
        old = self._objects.get(key)
        if old is None:
            return self.create(body, manager=manager)
        uid = body["metadata"].get("uid")
        if uid not in (None, old["metadata"]["uid"]):
            raise Conflict(f"{key.kind} {key.namespace}/{key.name} has another uid than {uid}")
        intent = _intent(body)
        others = tuple(other for name, other in self._intents[key].items() if name != manager)
        merged = apply_merge(old, self._intents[key].get(manager), intent, others)
        new = self._update(old, merged)
        self._intents[key][manager] = intent
        self.keeper.save(new, self._intents[key])
        return new

    def update_status(self, ref: Ref, status: Object, resource_version: str | None = None) -> Object:
        """Raises NotFound, Conflict, Invalid."""
        old = self._current(ref, resource_version)
        if not KINDS[ref.kind].status:
            raise Invalid(f"{ref.kind} has no status")
        return self._store(old, self._admitted({**old, "status": status}, old))

    def scale(self, ref: Ref, replicas: int) -> Object:
        """Write `/scale`. Raises NotFound, Conflict, Invalid."""
        if not KINDS[ref.kind].scale:
            raise Invalid(f"{ref.kind} has no /scale")
        if replicas < 0:
            raise Invalid(f"spec.replicas: at least 0 is needed, got {replicas}")
        old = self._current(ref, None)
        return self._update(old, {**old, "spec": {**old.get("spec", {}), "replicas": replicas}})

    def delete(self, ref: Ref, *, grace_s: int | None = None) -> Object | None:
        """Begin to delete; the object while it ends (finalizers, a pod's grace period), None when it is gone.

        Raises:
            NotFound, Conflict.
        """
        old = self._current(ref, None)
        if old["metadata"].get("deletionTimestamp") and grace_s != 0:
            return old
        grace = _grace_s(old, grace_s)
        if not grace and not old["metadata"].get("finalizers"):
            self._remove(old)
            return None
        marks = {"deletionTimestamp": timestamp(self.now()), "deletionGracePeriodSeconds": grace}
        marks["deletionTimestamp"] = old["metadata"].get("deletionTimestamp") or marks["deletionTimestamp"]
        return self._store(old, {**old, "metadata": {**old["metadata"], **marks}})

    # Inside

    def _load(self) -> None:
        for resource, intents in self.keeper.load():
            key = _key(resource)
            self._objects[key] = resource
            self._intents[key] = intents
            self._uids.add(resource["metadata"]["uid"])
            self._link(resource)
            self._note_event(key)
            self.version = max(self.version, int(resource["metadata"]["resourceVersion"]))
        self.version += 1000  # deletions since the newest object was written took versions too

    def _oldest(self) -> int:
        return self._history[0].version - 1 if self._history else self.version

    def _current(self, ref: Ref, resource_version: str | None) -> Object:
        found = self.get(Key(ref.kind, ref.namespace, ref.name))
        metadata = found["metadata"]
        if metadata["uid"] != ref.uid:
            raise Conflict(
                f"{ref.kind} {ref.namespace}/{ref.name} is another object: uid {metadata['uid']}, not {ref.uid}"
            )
        if resource_version not in (None, metadata["resourceVersion"]):
            raise Conflict(
                f"{ref.kind} {ref.namespace}/{ref.name} changed: version {metadata['resourceVersion']}, not {resource_version}"
            )
        return found

    def _update(self, old: Object, new: Object) -> Object:
        """A write of everything but status and the fields that the server owns."""
        metadata = dict(new["metadata"])
        for name in _SERVER_METADATA:
            metadata.pop(name, None)
            if name in old["metadata"]:
                metadata[name] = old["metadata"][name]
        metadata = {name: value for name, value in metadata.items() if value not in ({}, [], None)}
        new = {**new, "metadata": metadata, "apiVersion": old["apiVersion"], "kind": old["kind"]}
        if KINDS[old["kind"]].status:
            new.pop("status", None)
            if "status" in old:
                new["status"] = old["status"]
        check_identity(new)
        if old["metadata"].get("deletionTimestamp") and not _finalizers(new) <= _finalizers(old):
            raise Invalid("metadata.finalizers: none can be added while the object is being deleted")
        new = self._admitted(new, old)
        if _content(new) != _content(old):
            new = {**new, "metadata": {**new["metadata"], "generation": old["metadata"].get("generation", 1) + 1}}
        return self._store(old, new)

    def _admitted(self, new: Object, old: Object | None) -> Object:
        new = copy_plain(new)
        return self.admit(new, old) if KINDS[new["kind"]].ours else admit_builtin(new, old)

    def _store(self, old: Object, new: Object) -> Object:
        """Keep a changed object; one whose deletion has nothing to wait for any more goes."""
        if new == old:
            return old
        metadata = new["metadata"]
        ending = metadata.get("deletionTimestamp") and not metadata.get("finalizers")
        if ending and not metadata.get("deletionGracePeriodSeconds"):
            self._remove(new)
            return new
        self._unlink(old)
        return self._write("MODIFIED", new)

    def _write(self, change: Literal["ADDED", "MODIFIED"], resource: Object) -> Object:
        self.version += 1
        resource = {**resource, "metadata": {**resource["metadata"], "resourceVersion": str(self.version)}}
        key = _key(resource)
        self._objects[key] = resource
        self._uids.add(resource["metadata"]["uid"])
        self._link(resource)
        self.keeper.save(resource, self._intents[key])
        self._tell(Record(self.version, change, resource))
        return resource

    def _remove(self, resource: Object) -> None:
        key = _key(resource)
        known = self._objects.pop(key)
        self._intents.pop(key, None)
        self._uids.discard(known["metadata"]["uid"])
        self._unlink(known)
        self.keeper.drop(key)
        self.version += 1
        gone = {**resource, "metadata": {**resource["metadata"], "resourceVersion": str(self.version)}}
        self._tell(Record(self.version, "DELETED", gone))
        for dependent in sorted(self._dependents.get(resource["metadata"]["uid"], set())):
            found = self._objects.get(dependent)
            if found is not None:
                self._collect_orphan(found)

    def _collect_orphan(self, resource: Object) -> None:
        """Delete an object none of whose owners lives."""
        owners = {owner["uid"] for owner in resource["metadata"].get("ownerReferences") or ()}
        if owners and not owners & self._uids:
            self.delete(Ref(*_key(resource), resource["metadata"]["uid"]))

    def _link(self, resource: Object) -> None:
        for owner in resource["metadata"].get("ownerReferences") or ():
            self._dependents.setdefault(owner["uid"], set()).add(_key(resource))

    def _unlink(self, resource: Object) -> None:
        for owner in resource["metadata"].get("ownerReferences") or ():
            keys = self._dependents.get(owner["uid"], set())
            keys.discard(_key(resource))
            if not keys:
                self._dependents.pop(owner["uid"], None)

    def _note_event(self, key: Key) -> None:
        if key.kind != "Event":
            return
        self._events.append(key)
        while len(self._events) > MAX_EVENTS:
            oldest = self._objects.get(self._events.popleft())
            if oldest is not None:
                self._remove(oldest)

    def _tell(self, record: Record) -> None:
        self._history.append(record)
        for listener in tuple(self.listeners):
            listener(record)


_USER_METADATA = ("name", "namespace", "labels", "annotations", "finalizers", "ownerReferences")
_SERVER_METADATA = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
)


def matches(resource: Object, labels: Mapping[str, str] | None) -> bool:
    """Whether the object carries all of `labels`."""
    held = resource["metadata"].get("labels") or {}
    return all(held.get(name) == value for name, value in (labels or {}).items())


def _key(resource: Object) -> Key:
    return Key(resource["kind"], resource["metadata"]["namespace"], resource["metadata"]["name"])


def _with_namespace(body: Object) -> Object:
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping) or metadata.get("namespace"):
        return body
    return {**body, "metadata": {**metadata, "namespace": "default"}}


def _intent(body: Object) -> Intent:
    metadata = {name: body["metadata"][name] for name in _USER_METADATA if name in body["metadata"]}
    intent: Intent = copy_plain({**{name: body[name] for name in body if name != "status"}, "metadata": metadata})
    return intent


def _finalizers(resource: Object) -> set[str]:
    return set(resource["metadata"].get("finalizers") or ())


def _content(resource: Object) -> Object:
    return {name: value for name, value in resource.items() if name not in ("metadata", "status")}


def _grace_s(resource: Object, asked_s: int | None) -> int:
    """Seconds that a pod with processes gets; 0 for everything else."""
    started = bool((resource.get("spec") or {}).get("nodeName"))
    ended = (resource.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    if resource["kind"] != "Pod" or not started or ended:
        return 0
    if asked_s is not None:
        return asked_s
    return max(1, int(resource["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)))


def copy_plain(value: Any) -> Any:
    """A deep copy of plain JSON data."""
    if isinstance(value, Mapping):
        return {key: copy_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [copy_plain(inner) for inner in value]
    return value
