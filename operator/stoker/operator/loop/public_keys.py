"""The operator's public keys in the namespaces of its resources.

All pods of a namespace mount one ConfigMap. No resource owns it, so it is removed here, after the last resource.

Owned and called by the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from stoker.operator.cluster.interface import ClusterError
from stoker.operator.domain.labels import APPLIED_HASH
from stoker.operator.domain.plan import Key, Object
from stoker.operator.loop.execute import PlanExecutor
from stoker.operator.loop.store import Store, key_of

log = logging.getLogger(__name__)

USERS = ("TrainingJob", "InferenceDeployment", "EnginePool")
"""Kinds whose pods mount the keys."""


class PublicKeys:
    """One ConfigMap in each namespace; `wanted` returns it with the present keys."""

    def __init__(self, store: Store, executor: PlanExecutor, wanted: Callable[[str], Object]) -> None:
        self.store = store
        self.executor = executor
        self.wanted = wanted

    async def remove_if_unused(self, namespace: str) -> None:
        """Remove the keys from a namespace whose last resource is gone.

        A ConfigMap of that name that the operator did not apply stays.

        Raises:
            ClusterError: they could not be removed.
        """
        keys = self.store.get(self._key(namespace))
        if self._used(namespace) or keys is None or APPLIED_HASH not in (keys["metadata"].get("labels") or {}):
            return
        await self.executor.discard(keys)
        if self._used(namespace):  # a resource made meanwhile found the keys there, and will not look again
            await self.executor.apply(self.wanted(namespace))

    async def remove_unused(self) -> None:
        """Remove the keys from every such namespace: its last resource may have gone while no operator led."""
        for namespace in self._namespaces():
            try:
                await self.remove_if_unused(namespace)
            except ClusterError as problem:
                log.warning("the public keys stay in namespace %s: %s", namespace, problem)

    async def renew(self) -> None:
        """Update the keys in every namespace that has some.

        Raises:
            ClusterError: the first failure; what comes after it was not tried.
        """
        for namespace in self._namespaces():
            if self.store.get(self._key(namespace)) is not None:  # it may have been removed meanwhile
                await self.executor.apply(self.wanted(namespace))

    def _used(self, namespace: str) -> bool:
        return any(self.store.of_kind(kind, namespace) for kind in USERS)

    def _namespaces(self) -> list[str]:
        """Namespaces with such a ConfigMap."""
        found = [key_of(item) for item in self.store.of_kind("ConfigMap")]
        return [key.namespace for key in found if key == self._key(key.namespace)]

    def _key(self, namespace: str) -> Key:
        return key_of(self.wanted(namespace))
