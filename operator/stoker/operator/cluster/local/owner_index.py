"""Which objects name an owner, by the owner's uid."""

from __future__ import annotations

from stoker.operator.cluster.local.object_body import key_of
from stoker.operator.domain.plan import Key, Object


class OwnerIndex:
    """The dependents of each owner, whether it exists or not."""

    def __init__(self) -> None:
        self._dependents: dict[str, set[Key]] = {}

    def dependents(self, uid: str) -> list[Key]:
        """The objects that name this owner, in order."""
        return sorted(self._dependents.get(uid, set()))

    def add(self, resource: Object) -> None:
        for owner in resource["metadata"].get("ownerReferences") or ():
            self._dependents.setdefault(owner["uid"], set()).add(key_of(resource))

    def remove(self, resource: Object) -> None:
        for owner in resource["metadata"].get("ownerReferences") or ():
            keys = self._dependents.get(owner["uid"], set())
            keys.discard(key_of(resource))
            if not keys:
                self._dependents.pop(owner["uid"], None)
