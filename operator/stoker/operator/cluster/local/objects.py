"""The object store of the embedded cluster: the API server's rules without the network.

Resource versions, generations, status apart from spec, finalizers with deletion in two steps, owner references, and the
history that watches read. Stored objects are never changed in place. Not thread-safe: one event loop uses it.

Made by the supervisor. Called by `LocalCluster`, the kubelet and the supervisor's API.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from stoker.operator.cluster.interface import AlreadyExists, Conflict, Invalid, NotFound
from stoker.operator.cluster.kinds import KINDS
from stoker.operator.cluster.local.builtin import admit_builtin, check_identity
from stoker.operator.cluster.local.merge import Intent, apply_merge, merge_patch
from stoker.operator.cluster.local.object_body import (
    SERVER_METADATA,
    USER_METADATA,
    content_of,
    copy_plain,
    finalizers_of,
    grace_s_of,
    intent_of,
    key_of,
    matches,
    with_namespace,
)  # fmt: skip
from stoker.operator.cluster.local.object_storage import LostObject, MemoryOnly, ObjectStorage, StateFolderError
from stoker.operator.cluster.local.owner_index import OwnerIndex
from stoker.operator.cluster.local.watch_history import HISTORY, Record, WatchHistory
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.plan import Key, Object, Ref

log = logging.getLogger(__name__)

MAX_EVENTS = 1000
"""Largest number of Event objects; the oldest are deleted."""

Admit = Callable[[Object, Object | None], Object]
"""(new, old) -> the object with defaults and without unknown fields; raises Invalid."""


class ObjectStore:
    """All objects of one cluster."""

    def __init__(
        self,
        *,
        now: Callable[[], datetime],
        new_uid: Callable[[], str],
        admit: Admit | None = None,
        storage: ObjectStorage | None = None,
        history: int = HISTORY,
    ) -> None:
        self.now = now
        self.new_uid = new_uid
        self.admit = admit or (lambda new, _: new)
        self.storage = storage or MemoryOnly()
        self.storage_problem = ""
        """Why the last write failed; empty when it did not."""
        self.lost: dict[Key, LostObject] = {}
        self.load_problems: Sequence[str] = ()
        self.listeners: list[Callable[[Record], None]] = []
        self.version = 0
        self._objects: dict[Key, Object] = {}
        self._intents: dict[Key, dict[str, Intent]] = {}
        self._uids: set[str] = set()
        self._owners = OwnerIndex()
        self._events: deque[Key] = deque()
        self._orphans: set[Key] = set()
        """Objects without a living owner that could not be deleted yet."""
        self._history = WatchHistory(history)
        self._load()

    # Reading

    def find(self, key: Key) -> Object | None:
        return self._objects.get(key)

    def get(self, key: Key) -> Object:
        """The object. Raises NotFound."""
        found = self._objects.get(key)
        if found is None:
            raise NotFound(f"{key.kind} {key.namespace}/{key.name} does not exist")
        return found

    def of_kind(self, kind: str, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> list[Object]:
        """List the objects of a kind in the order of their names."""
        if kind not in KINDS:
            raise NotFound(f"no kind {kind!r}")
        keys = sorted(key for key in self._objects if key.kind == kind and namespace in (None, key.namespace))
        return [self._objects[key] for key in keys if matches(self._objects[key], labels)]

    def since(self, version: int) -> list[Record]:
        """List the changes after `version`, oldest first.

        Raises:
            Gone: the history does not reach so far back.
        """
        return self._history.since(version, self.version)

    def forget_history(self) -> None:
        """Drop the history: a new watch from any earlier version fails, as after a compaction."""
        self._history.clear()
        self.version += 1

    # Writing

    def create(self, body: Object, *, manager: str | None = None) -> Object:
        """Create an object. Raises AlreadyExists, Invalid, StateFolderError (as every write)."""
        body = with_namespace(body)
        check_identity(body)
        key = key_of(body)
        if key in self._objects:
            raise AlreadyExists(f"{key.kind} {key.namespace}/{key.name} exists already")
        metadata = {name: body["metadata"][name] for name in USER_METADATA if body["metadata"].get(name)}
        metadata |= {"uid": self.new_uid(), "creationTimestamp": timestamp(self.now()), "generation": 1}
        created = {**body, "metadata": metadata}
        if KINDS[key.kind].status:
            created.pop("status", None)
        created = self._admitted(created, None)
        if key.kind == "Pod":
            created["status"] = {"phase": "Pending"}
        written = self._write("ADDED", created, {manager: intent_of(body)} if manager else {})
        self._note_event(key)
        self._collect_orphan(written)
        return written

    def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        """Patch everything but status by JSON merge. Raises NotFound, Conflict, Invalid."""
        old = self._current(ref, str((body.get("metadata") or {}).get("resourceVersion") or "") or None)
        return self._update(old, merge_patch(old, {**body, "metadata": {**(body.get("metadata") or {})}}))

    def apply(self, body: Object, manager: str) -> Object:
        """Apply as the API server does. Raises Conflict on another uid, Invalid."""
        body = with_namespace(body)
        check_identity(body)
        key = key_of(body)
        old = self._objects.get(key)
        if old is None:
            return self.create(body, manager=manager)
        uid = body["metadata"].get("uid")
        if uid not in (None, old["metadata"]["uid"]):
            raise Conflict(f"{key.kind} {key.namespace}/{key.name} has another uid than {uid}")
        intent = intent_of(body)
        others = tuple(other for name, other in self._intents[key].items() if name != manager)
        before = self._intents[key].get(manager)
        merged = apply_merge(old, before, intent, others, self._defaulted(before))
        return self._update(old, merged, {**self._intents[key], manager: intent})

    def _defaulted(self, intent: Intent | None) -> Object:
        """An earlier intent as it was stored; as it is where it is no whole object."""
        if intent is None:
            return {}
        try:
            return self.admit(dict(intent), None)
        except Invalid:
            return dict(intent)

    def update_status(self, ref: Ref, status: Object, resource_version: str | None = None) -> Object:
        """Replace the status. Raises NotFound, Conflict, Invalid."""
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
        """Begin to delete; returns the object while it ends (finalizers, a pod's grace period), None when it is gone.

        Raises:
            NotFound, Conflict.
        """
        old = self._current(ref, None)
        if old["metadata"].get("deletionTimestamp") and grace_s != 0:
            return old
        grace = grace_s_of(old, grace_s)
        if not grace and not old["metadata"].get("finalizers"):
            self._remove(old)
            return None
        marks = {"deletionTimestamp": timestamp(self.now()), "deletionGracePeriodSeconds": grace}
        marks["deletionTimestamp"] = old["metadata"].get("deletionTimestamp") or marks["deletionTimestamp"]
        return self._store(old, {**old, "metadata": {**old["metadata"], **marks}})

    def twin(self, key: Key) -> ObjectStore:
        """A store in memory with this one object of ours at most, on which a write can be tried."""
        trial = ObjectStore(now=self.now, new_uid=self.new_uid, admit=self.admit)
        trial.version = self.version
        if key in self._objects:
            trial._objects[key], trial._intents[key] = self._objects[key], self._intents[key]
        return trial

    # The state folder

    def problems(self) -> list[str]:
        """Describe the problems of the storage: a failure that lasts, and objects that are lost."""
        failing = f"{self.storage_problem}; objects cannot be changed until it can" if self.storage_problem else ""
        lost = [self.lost_message(key) for key in sorted(self.lost)]
        return [*([failing] if failing else []), *self.load_problems, *lost]

    def lost_message(self, key: Key) -> str:
        """Explain why an object is lost, and the two ways out."""
        about = f"{key.kind} {key.namespace}/{key.name} is lost: {self.lost[key].problem}"
        return (
            f"{about}. Put the file back and restart the supervisor, or create the object again: "
            "stoker local apply --recreate-lost -f FILE"
        )

    def give_up(self, key: Key) -> None:
        """Forget a lost object; what it owned is deleted.

        Raises:
            NotFound: no such object is lost.
            StateFolderError.
        """
        if key not in self.lost:
            raise NotFound(f"{key.kind} {key.namespace}/{key.name} does not exist")
        self._persist(lambda: self.storage.drop(key))
        self._forget_lost(key)

    def repair(self) -> None:
        """Probe a storage that failed, and delete the objects that could not be deleted meanwhile."""
        if self.storage_problem:
            try:
                self._persist(self.storage.probe)
            except StateFolderError:
                return
        for key in sorted(self._orphans):
            self._orphans.discard(key)
            found = self._objects.get(key)
            if found is not None:
                self._collect_orphan(found)

    def _persist(self, write: Callable[[], None]) -> None:
        """Carry out a write of the storage.

        Raises:
            StateFolderError: it failed; nothing was changed.
        """
        try:
            write()
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            problem = f"the state folder cannot be written: {place}{error.strerror or error}"
            if not self.storage_problem:
                log.error("%s", problem)
            self.storage_problem = problem
            raise StateFolderError(problem) from error
        if self.storage_problem:
            log.warning("the state folder can be written again")
            self.storage_problem = ""

    # Inside

    def _load(self) -> None:
        loaded = self.storage.load()
        self.load_problems = loaded.problems
        self.lost = {found.key: found for found in loaded.lost}
        self._uids |= {found.uid for found in loaded.lost}
        for stored in loaded.objects:
            resource, key = stored.resource, key_of(stored.resource)
            self._objects[key] = resource
            self._intents[key] = dict(stored.intents)
            self._uids.add(resource["metadata"]["uid"])
            self._owners.add(resource)
            self._note_event(key)
            self.version = max(self.version, int(resource["metadata"]["resourceVersion"]))
        self.version += 1000  # deletions since the newest object was written took versions too
        for problem in self.problems():
            log.error("%s", problem)

    def _current(self, ref: Ref, resource_version: str | None) -> Object:
        found = self.get(Key(ref.kind, ref.namespace, ref.name))
        metadata = found["metadata"]
        if metadata["uid"] != ref.uid:
            raise Conflict(
                f"{ref.kind} {ref.namespace}/{ref.name} is another object: uid {metadata['uid']}, not {ref.uid}"
            )
        if resource_version not in (None, metadata["resourceVersion"]):
            versions = f"version {metadata['resourceVersion']}, not {resource_version}"
            raise Conflict(f"{ref.kind} {ref.namespace}/{ref.name} changed: {versions}")
        return found

    def _update(self, old: Object, new: Object, intents: Mapping[str, Intent] | None = None) -> Object:
        """Write everything but status and the fields that the server owns."""
        metadata = dict(new["metadata"])
        for name in SERVER_METADATA:
            metadata.pop(name, None)
            if name in old["metadata"]:
                metadata[name] = old["metadata"][name]
        metadata = {name: value for name, value in metadata.items() if value not in ({}, [], None)}
        new = {**new, "metadata": metadata, "apiVersion": old["apiVersion"], "kind": old["kind"]}
        if KINDS[old["kind"]].status:
            new.pop("status", None)
            if "status" in old:
                new["status"] = old["status"]
        # A field as an earlier version stored it keeps no other one from being changed.
        changed = {name: metadata[name] for name in metadata if metadata[name] != old["metadata"].get(name)}
        own = {"name": old["metadata"]["name"], "namespace": old["metadata"]["namespace"]}
        check_identity({**new, "metadata": {**own, **changed}})
        if old["metadata"].get("deletionTimestamp") and not finalizers_of(new) <= finalizers_of(old):
            raise Invalid("metadata.finalizers: none can be added while the object is being deleted")
        new = self._admitted(new, old)
        if content_of(new) != content_of(old):
            new = {**new, "metadata": {**new["metadata"], "generation": old["metadata"].get("generation", 1) + 1}}
        return self._store(old, new, intents)

    def _admitted(self, new: Object, old: Object | None) -> Object:
        new = copy_plain(new)
        return self.admit(new, old) if KINDS[new["kind"]].ours else admit_builtin(new, old)

    def _store(self, old: Object, new: Object, intents: Mapping[str, Intent] | None = None) -> Object:
        """Store a changed object; remove one whose deletion has nothing to wait for any more."""
        key = key_of(old)
        if new == old:
            if intents is not None and intents != self._intents[key]:
                self._persist(lambda: self.storage.save(old, intents))
                self._intents[key] = dict(intents)
            return old
        metadata = new["metadata"]
        ending = metadata.get("deletionTimestamp") and not metadata.get("finalizers")
        if ending and not metadata.get("deletionGracePeriodSeconds"):
            self._remove(new)
            return new
        return self._write("MODIFIED", new, self._intents[key] if intents is None else intents)

    def _write(self, change: Literal["ADDED", "MODIFIED"], resource: Object, intents: Mapping[str, Intent]) -> Object:
        """Save an object, then change memory: what is acknowledged was written."""
        version = self.version + 1
        resource = {**resource, "metadata": {**resource["metadata"], "resourceVersion": str(version)}}
        key = key_of(resource)
        self._persist(lambda: self.storage.save(resource, intents))
        self.version = version
        if key in self._objects:
            self._owners.remove(self._objects[key])
        self._objects[key] = resource
        self._intents[key] = dict(intents)
        self._uids.add(resource["metadata"]["uid"])
        self._owners.add(resource)
        if key in self.lost:
            log.warning("%s %s/%s was lost and is created again", *key)
            self._forget_lost(key)
        self._notify(Record(version, change, resource))
        return resource

    def _remove(self, resource: Object) -> None:
        key = key_of(resource)
        self._persist(lambda: self.storage.drop(key))
        known = self._objects.pop(key)
        self._intents.pop(key, None)
        self._uids.discard(known["metadata"]["uid"])
        self._owners.remove(known)
        self.version += 1
        gone = {**resource, "metadata": {**resource["metadata"], "resourceVersion": str(self.version)}}
        self._notify(Record(self.version, "DELETED", gone))
        self._collect_dependents(resource["metadata"]["uid"])

    def _forget_lost(self, key: Key) -> None:
        uid = self.lost.pop(key).uid
        if uid:
            self._uids.discard(uid)
            self._collect_dependents(uid)

    def _collect_dependents(self, uid: str) -> None:
        for dependent in self._owners.dependents(uid):
            found = self._objects.get(dependent)
            if found is not None:
                self._collect_orphan(found)

    def _collect_orphan(self, resource: Object) -> None:
        """Delete an object of which no owner exists; `repair` tries again if that fails."""
        owners = {owner["uid"] for owner in resource["metadata"].get("ownerReferences") or ()}
        if owners and not owners & self._uids:
            try:
                self.delete(Ref(*key_of(resource), resource["metadata"]["uid"]))
            except StateFolderError:
                self._orphans.add(key_of(resource))

    def _note_event(self, key: Key) -> None:
        if key.kind != "Event":
            return
        self._events.append(key)
        while len(self._events) > MAX_EVENTS:
            oldest = self._objects.get(self._events[0])
            try:
                if oldest is not None:
                    self._remove(oldest)
            except StateFolderError:
                return  # the next Event tries again
            self._events.popleft()

    def _notify(self, record: Record) -> None:
        self._history.add(record)
        for listener in tuple(self.listeners):
            listener(record)
