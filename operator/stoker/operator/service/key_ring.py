"""The Ed25519 keys that sign control calls: the current one and the one that follows it.

Pods know both public keys, so the next can become the current without a restart of any pod. The pair is kept in a
Secret of the operator's namespace, or in a mounted folder that the operator only reads.

Owned by `program`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from stoker.operator.cluster.interface import AlreadyExists, Cluster, NotFound
from stoker.operator.domain.clock import Clock, timestamp
from stoker.operator.domain.plan import Object, Ref
from stoker.pod.control_key import new_private_key, public_key

CURRENT, NEXT = "current.pem", "next.pem"
ROTATED_AT = "stoker.dev/rotated-at"


class BadKeys(ValueError):
    """The keys cannot be used; the message names the Secret or file and the entry."""


@dataclass(frozen=True)
class KeyRing:
    """Private keys as PEM."""

    current: bytes
    next: bytes | None = None

    def public_keys(self) -> Mapping[str, str]:
        """Build the data of the ConfigMap that pods mount."""
        named = {CURRENT: self.current, NEXT: self.next}
        return {name: public_key(key).decode() for name, key in named.items() if key is not None}


def rotated(ring: KeyRing, fresh: bytes) -> KeyRing:
    """Make the next key the current one; pods receive `fresh` long before it signs."""
    return KeyRing(current=ring.next or fresh, next=fresh)


def read_folder(folder: Path) -> KeyRing:
    """Read the keys of a mounted folder. Raises BadKeys."""
    try:
        current = (folder / CURRENT).read_bytes()
    except OSError as error:
        raise BadKeys(f"control_key.folder: {folder / CURRENT}: {error.strerror}") from error
    following = folder / NEXT
    return _checked(KeyRing(current, following.read_bytes() if following.exists() else None), str(folder))


class KeySecret:
    """The Secret with the key pair, created by its first reader. Every call may be repeated."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        namespace: str,
        name: str,
        *,
        rotate_days: int = 90,
        new_key: Callable[[], bytes] = new_private_key,
    ) -> None:
        self.cluster = cluster
        self.clock = clock
        self.namespace = namespace
        self.name = name
        self.rotate_days = rotate_days
        self.new_key = new_key

    async def read(self) -> KeyRing:
        """Read the ring, and rotate it when it is due. Raises BadKeys, ClusterError."""
        try:
            secret = await self.cluster.get("Secret", self.namespace, self.name)
        except NotFound:
            secret = await self._make()
        ring = self._ring(secret)
        return await self._rotate(secret, ring) if self._due(secret) else ring

    async def _make(self) -> Object:
        ring = KeyRing(self.new_key(), self.new_key())
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "labels": {"app.kubernetes.io/part-of": "stoker", "app.kubernetes.io/managed-by": "stoker-operator"},
                "annotations": {ROTATED_AT: timestamp(self.clock.now())},
            },
            "type": "Opaque",
            "data": _data(ring),
        }
        try:
            return await self.cluster.create(body)
        except AlreadyExists:
            return await self.cluster.get("Secret", self.namespace, self.name)

    async def _rotate(self, secret: Object, ring: KeyRing) -> KeyRing:
        metadata = secret["metadata"]
        new = rotated(ring, self.new_key())
        body = {
            "metadata": {
                "resourceVersion": metadata["resourceVersion"],
                "annotations": {ROTATED_AT: timestamp(self.clock.now())},
            },
            "data": _data(new),
        }
        await self.cluster.patch(Ref("Secret", self.namespace, self.name, metadata["uid"]), body)
        return new

    def _due(self, secret: Object) -> bool:
        """Whether to rotate: a Secret that the operator did not create has no date and is left alone."""
        at = (secret["metadata"].get("annotations") or {}).get(ROTATED_AT)
        if not at or not self.rotate_days:
            return False
        return self.clock.now() >= datetime.fromisoformat(at) + timedelta(days=self.rotate_days)

    def _ring(self, secret: Object) -> KeyRing:
        where = f"Secret {self.namespace}/{self.name}"
        data = secret.get("data") or {}
        if CURRENT not in data:
            raise BadKeys(f"{where} has no {CURRENT}, found {', '.join(sorted(data)) or 'nothing'}")
        try:
            keys = {name: base64.b64decode(data[name], validate=True) for name in (CURRENT, NEXT) if name in data}
        except binascii.Error as error:
            raise BadKeys(f"{where}: {error}") from error
        return _checked(KeyRing(keys[CURRENT], keys.get(NEXT)), where)


def _checked(ring: KeyRing, where: str) -> KeyRing:
    try:
        ring.public_keys()
    except (ValueError, TypeError, AttributeError) as error:
        raise BadKeys(f"{where}: not an Ed25519 private key in PEM: {error}") from error
    return ring


def _data(ring: KeyRing) -> dict[str, str]:
    keys = {CURRENT: ring.current, NEXT: ring.next}
    return {name: base64.b64encode(key).decode() for name, key in keys.items() if key is not None}
