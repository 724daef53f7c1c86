"""The Lease object on a Kubernetes API server.

Read and written by the elector (`lease`) alone; made by `program`.
"""

from __future__ import annotations

from stoker.operator.cluster.kinds import Kind
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.paths import collection, single
from stoker.operator.domain.plan import Object
from stoker.operator.service.lease import API_VERSION

KIND = Kind("Lease", API_VERSION, "leases")


class KubeLease:
    """One Lease in the operator's namespace."""

    def __init__(self, connection: ApiConnection, namespace: str, name: str) -> None:
        self.connection = connection
        self.namespace = namespace
        self.name = name

    async def read(self, timeout_s: float) -> Object:
        path = single(KIND, self.namespace, self.name)
        return await self.connection.request("GET", path, resource=KIND.plural, timeout_s=timeout_s)

    async def create(self, spec: Object, timeout_s: float) -> Object:
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND.name,
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": spec,
        }
        path = collection(KIND, self.namespace)
        return await self.connection.request("POST", path, resource=KIND.plural, body=body, timeout_s=timeout_s)

    async def replace(self, lease: Object, timeout_s: float) -> Object:
        """Replace with the version that was read: two replicas never both succeed."""
        path = single(KIND, self.namespace, self.name)
        return await self.connection.request("PUT", path, resource=KIND.plural, body=lease, timeout_s=timeout_s)
