"""The operator's memory of the cluster: objects by kind with indexes, reports of pods, refusals. It reads no cluster.

Stored objects are read-only. Informers put them, and the executor writes its own results through. An older version of
an object never replaces a newer one, and a deleted object does not come back by a late event.

Owned by the loop: informers, poller and executor change it, `observe` reads it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.operator.domain.labels import INDEXED
from stoker.operator.domain.plan import Key, Object, Report
from stoker.operator.domain.references import references
from stoker.operator.loop.interning import Interner
from stoker.operator.loop.object_pruning import pruned, reuse_equal

MAX_TOMBSTONES = 10_000
TERMINATING_S = 600.0
"""Time for which a namespace that took nothing new counts as being deleted."""
MAX_GONE = 500
"""Pods that ended and are gone, remembered for their termination message."""
_SHARED = ("pinned", "acceptedSpec", "conditions", "pods", "containerStatuses")
"""Parts of a status that are equal in many objects: what repeats the spec or was rendered from it, and what a thousand
pods in the same state say."""


@dataclass(frozen=True)
class Change:
    """One object before and after; None stands for absent."""

    old: Object | None
    new: Object | None

    @property
    def object(self) -> Object:
        found = self.new or self.old
        assert found is not None
        return found


Listener = Callable[[Change], None]


def key_of(resource: Object) -> Key:
    metadata = resource["metadata"]
    return Key(resource["kind"], metadata.get("namespace", ""), metadata["name"])


def version_of(resource: Object) -> int:
    """Resource versions of one object are comparable numbers."""
    return int(resource["metadata"]["resourceVersion"])


class Store:
    """Objects with indexes by owner, label and reference."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self._objects: dict[Key, Object] = {}
        self._by_uid: dict[str, Key] = {}
        self._by_kind: defaultdict[tuple[str, str], set[Key]] = defaultdict(set)
        self._by_owner: defaultdict[str, set[Key]] = defaultdict(set)
        self._by_label: defaultdict[tuple[str, str], defaultdict[str, set[Key]]] = defaultdict(lambda: defaultdict(set))
        self._by_reference: defaultdict[Key, set[Key]] = defaultdict(set)
        self._references: dict[Key, frozenset[Key]] = {}
        self._tombstones: OrderedDict[str, int] = OrderedDict()
        self._reports: dict[str, Report] = {}
        self._gone: OrderedDict[str, Object] = OrderedDict()
        self._terminating: dict[str, float] = {}
        self._refusals: dict[Key, str] = {}
        self._interner = Interner()

    # Reading

    def get(self, key: Key) -> Object | None:
        return self._objects.get(key)

    def by_uid(self, uid: str) -> Object | None:
        key = self._by_uid.get(uid)
        return self._objects[key] if key else None

    def of_kind(self, kind: str, namespace: str | None = None) -> list[Object]:
        if namespace is not None:
            return self._sorted(self._by_kind.get((kind, namespace), ()))
        return self._sorted(key for (found, _), keys in self._by_kind.items() if found == kind for key in keys)

    def owned_by(self, uid: str) -> list[Object]:
        """Objects with an owner reference to `uid`."""
        return self._sorted(self._by_owner.get(uid, ()))

    def labelled(self, label: str, value: str, kind: str | None = None) -> list[Object]:
        """Objects with an indexed label, of one kind or of any."""
        if label not in INDEXED:
            raise ValueError(f"label {label} has no index, indexed are {', '.join(INDEXED)}")
        by_kind: Mapping[str, set[Key]] = self._by_label.get((label, value), {})
        if kind is not None:
            return self._sorted(by_kind.get(kind, ()))
        return self._sorted(key for keys in by_kind.values() for key in keys)

    def gone(self, label: str, value: str) -> list[Object]:
        """Pods with a label that ended and were removed at once, as an eviction does, in their last state."""
        return [pod for pod in self._gone.values() if (pod["metadata"].get("labels") or {}).get(label) == value]

    def is_terminating(self, namespace: str, now_s: float) -> bool:
        """Whether the cluster refused something new there lately because the namespace is being deleted."""
        since = self._terminating.get(namespace)
        return since is not None and now_s - since < TERMINATING_S

    def counts(self) -> dict[str, int]:
        """Number of objects of each kind."""
        counts: dict[str, int] = {}
        for (kind, _), keys in self._by_kind.items():
            counts[kind] = counts.get(kind, 0) + len(keys)
        return counts

    def referring_to(self, key: Key) -> list[Object]:
        """Objects whose spec or status names `key`."""
        return self._sorted(self._by_reference.get(key, ()))

    def references_of(self, key: Key) -> frozenset[Key]:
        if key.kind == "Pod":  # one node, read from the pod: a set for each of thousands of pods takes memory
            return references(self._objects[key]) if key in self._objects else frozenset()
        return self._references.get(key, frozenset())

    def report(self, pod_uid: str) -> Report | None:
        """The pod's newest answer."""
        return self._reports.get(pod_uid)

    def refusal(self, key: Key) -> str | None:
        """The cluster's answer when it refused the last pass over `key`.

        It is kept in memory like a report: the first pass of the next operator asks the cluster again.
        """
        return self._refusals.get(key)

    def pruned(self, resource: Object, old: Object | None = None) -> Object:
        """The object as it is stored: pruned, and sharing the parts that many objects have in common."""
        resource = pruned(resource, old)
        kept = old is not None and resource.get("spec") is old.get("spec")
        if "spec" in resource and resource["kind"] != "Pod" and not kept:
            resource = {**resource, "spec": self._interner.intern(resource["spec"])}
        owners = resource["metadata"].get("ownerReferences")
        if owners:
            resource["metadata"]["ownerReferences"] = self._interner.intern(owners)
        status = resource.get("status") or {}
        before = ((old or {}).get("status")) or {}
        shared = {name: status[name] for name in _SHARED if name in status and status[name] is not before.get(name)}
        if shared:
            resource["status"] = {**status, **{name: self._interner.intern(value) for name, value in shared.items()}}
        return resource

    # Writing

    def put(self, resource: Object) -> bool:
        """Store a newer version; False when that version or a newer one was stored already."""
        key = key_of(resource)
        uid = resource["metadata"]["uid"]
        version = version_of(resource)
        old = self._objects.get(key)
        if self._tombstones.get(uid, -1) >= version:
            return False
        if old is not None and version_of(old) >= version:
            return False
        resource = self.pruned(resource, old)
        self._unindex(key)
        self._index(key, resource)
        self._notify(Change(old, resource))
        return True

    def remove(self, key: Key, uid: str, version: int | None = None, *, last: Object | None = None) -> bool:
        """Forget an object that is gone; one of the same name with another uid stays. `last` is its last state."""
        old = self._objects.get(key)
        self._bury(uid, version)
        if old is None or old["metadata"]["uid"] != uid:
            return False
        self._remember(pruned(last, old) if last is not None else old)
        self._bury(uid, version_of(old))
        self._unindex(key)
        self._reports.pop(uid, None)
        self._notify(Change(old, None))
        return True

    def replace(self, kind: str, items: Iterable[Object], list_version: int, namespace: str | None = None) -> None:
        """Make the store equal to a list: what it lacks is gone, unless it was written after the list was made."""
        listed = tuple(items)
        self.forget_unlisted(kind, listed, list_version, namespace)
        for item in listed:
            self.put(item)

    def forget_unlisted(
        self, kind: str, items: Iterable[Object], list_version: int, namespace: str | None = None
    ) -> None:
        """The first half of `replace`: remove what the list lacks; the caller may insert the items later."""
        listed = {key_of(item): item["metadata"]["uid"] for item in items}
        for known in self.of_kind(kind, namespace):
            key, uid = key_of(known), known["metadata"]["uid"]
            if listed.get(key) != uid and version_of(known) <= list_version:
                self.remove(key, uid)

    def put_report(self, pod_uid: str, body: Report) -> bool:
        """Store a pod's answer; True when it differs from the one before."""
        if pod_uid not in self._by_uid:
            return False
        old = self._reports.get(pod_uid)
        if old == body:
            return False
        self._reports[pod_uid] = reuse_equal(body, old)
        return True

    def set_terminating(self, namespace: str, now_s: float | None) -> None:
        """Note the time at which the cluster took nothing new because the namespace is being deleted; None: it did."""
        if now_s is None:
            self._terminating.pop(namespace, None)
        else:
            self._terminating[namespace] = now_s

    def put_refusal(self, key: Key, answer: str | None) -> bool:
        """Store the refusal of the last pass, or remove it (None) after an accepted one; True when it changed."""
        old = self._refusals.pop(key, None)
        if answer is not None:
            self._refusals[key] = answer
        return old != answer

    # Inside

    def _sorted(self, keys: Iterable[Key]) -> list[Object]:
        return [self._objects[key] for key in sorted(keys)]

    def _index(self, key: Key, resource: Object) -> None:
        metadata = resource["metadata"]
        self._objects[key] = resource
        self._by_uid[metadata["uid"]] = key
        self._by_kind[key.kind, key.namespace].add(key)
        for owner in metadata.get("ownerReferences") or ():
            self._by_owner[owner["uid"]].add(key)
        for entry in _indexed_labels(resource):
            self._by_label[entry][key.kind].add(key)
        named = references(resource)
        if named and key.kind != "Pod":
            self._references[key] = named
        for target in named:
            self._by_reference[target].add(key)

    def _unindex(self, key: Key) -> None:
        named = self.references_of(key)
        resource = self._objects.pop(key, None)
        if resource is None:
            return
        metadata = resource["metadata"]
        self._by_uid.pop(metadata["uid"], None)
        _discard(self._by_kind, (key.kind, key.namespace), key)
        for owner in metadata.get("ownerReferences") or ():
            _discard(self._by_owner, owner["uid"], key)
        for entry in _indexed_labels(resource):
            _discard(self._by_label[entry], key.kind, key)
            if not self._by_label[entry]:
                del self._by_label[entry]
        self._references.pop(key, None)
        for target in named:
            _discard(self._by_reference, target, key)

    def _remember(self, pod: Object) -> None:
        """Remember a pod that another client deleted after it had ended by itself."""
        if pod["kind"] != "Pod" or (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
            return
        if not pod["metadata"].get("deletionTimestamp"):
            return
        self._gone[pod["metadata"]["uid"]] = pod
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _bury(self, uid: str, version: int | None) -> None:
        self._tombstones[uid] = max(version or 0, self._tombstones.pop(uid, 0))
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _notify(self, change: Change) -> None:
        for listener in self.listeners:
            listener(change)


def _indexed_labels(resource: Object) -> list[tuple[str, str]]:
    labels = resource["metadata"].get("labels") or {}
    return [(label, labels[label]) for label in INDEXED if label in labels]


def _discard(index: defaultdict[Any, set[Key]], entry: Any, key: Key) -> None:
    keys = index.get(entry)
    if keys is not None:
        keys.discard(key)
        if not keys:
            del index[entry]
