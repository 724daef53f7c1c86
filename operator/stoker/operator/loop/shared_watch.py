"""One watch for two readers: the store takes nodes and our pods, the capacity takes every node and every pod.

Each pod event is then sent, decoded and reduced once. Made by the loop where it has all nodes and pods in view.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from stoker.operator.domain.labels import is_managed
from stoker.operator.domain.plan import Key, Object
from stoker.operator.loop.capacity_watch import CapacityWatch
from stoker.operator.loop.store import Store, key_of, version_of

_OWN = "own"
"""The object as the store keeps it, inside of a listed object as the capacity keeps it."""


class SharedWatch:
    """The sink of the informers of all nodes and pods.

    The store sees what a watch with our label as its selector shows: a pod that loses the label is gone. Pods of other
    namespaces than the operator's are another operator's: they take room, and that is all.
    """

    def __init__(self, store: Store, capacity: CapacityWatch, namespaces: Collection[str] = ()) -> None:
        """`namespaces`: the operator's; empty: all."""
        self._store, self._capacity = store, capacity
        self._namespaces = frozenset(namespaces)

    def pruned(self, resource: Object, /) -> Object:
        counted = self._capacity.pruned(resource)
        return {**counted, _OWN: self._store.pruned(resource)} if self._is_ours(resource) else counted

    def put(self, resource: Object) -> bool:
        """Take a node or a pod, as it is or as `pruned` returned it; True when that changed something."""
        changed = self._capacity.put(resource)
        own = resource.get(_OWN) if _OWN in resource or not self._is_ours(resource) else resource
        if own is not None:
            return self._store.put(own) or changed
        return self._lose(key_of(resource), resource["metadata"]["uid"], version_of(resource)) or changed

    def remove(self, key: Key, uid: str, version: int, /, *, last: Object | None) -> bool:
        """Forget a node or a pod that is gone. Pods of others leave no trace in the store."""
        changed = self._capacity.remove(key, uid, version, last=last)
        if last is not None and self._is_ours(last):
            return self._store.remove(key, uid, version, last=last) or changed
        return self._lose(key, uid, version) or changed

    def forget_unlisted(self, kind: str, items: Iterable[Object], version: int, namespace: str | None, /) -> None:
        """Forget what a list lacks."""
        listed = tuple(items)
        self._capacity.forget_unlisted(kind, listed, version, namespace)
        self._store.forget_unlisted(kind, (item[_OWN] for item in listed if _OWN in item), version, namespace)

    def _lose(self, key: Key, uid: str, version: int) -> bool:
        """Forget a pod that was ours."""
        known = self._store.get(key)
        if known is None or known["metadata"]["uid"] != uid or version_of(known) > version:
            return False
        return self._store.remove(key, uid, version)

    def _is_ours(self, resource: Object) -> bool:
        if resource["kind"] == "Node":
            return True
        return is_managed(resource) and (not self._namespaces or resource["metadata"]["namespace"] in self._namespaces)
