"""The GPUs of dynamic resource allocation, read with the caller's own rights where the API server has them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from stoker.gateway.cluster.interface import ApiError, Cluster, Kind, Object, Selection, list_all
from stoker.gateway.domain.claimed_gpus import ClaimedGpus
from stoker.pod.resources.device import GROUP, readable_version


async def gpus_of_drivers(cluster: Cluster) -> tuple[ClaimedGpus, str]:
    """Read all devices and claims; with the reason where they cannot be read, and then count none."""
    try:
        if not (version := readable_version(await cluster.versions(GROUP))):
            return ClaimedGpus(), ""
        (slices, _), (claims, _) = await asyncio.gather(
            list_all(cluster, Kind("ResourceSlice", version, "resourceslices"), Selection()),
            list_all(cluster, _claim_kind(version), Selection()),
        )
    except ApiError as error:
        return ClaimedGpus(), f"GPUs of dynamic resource allocation are not counted: {error}"
    return ClaimedGpus(slices, claims), ""


async def claims_of_pods(cluster: Cluster, namespace: str, pods: Iterable[Object]) -> ClaimedGpus:
    """Read the claims of a namespace where a pod has some; what the caller may not read counts as none."""
    claims: Sequence[Object] = ()
    if any(pod["spec"].get("resourceClaims") for pod in pods):
        try:
            version = readable_version(await cluster.versions(GROUP))
            claims, _ = await list_all(cluster, _claim_kind(version), Selection(namespace)) if version else ((), "")
        except ApiError as error:
            if error.status != 403:
                raise
    return ClaimedGpus((), claims)


def _claim_kind(version: str) -> Kind:
    return Kind("ResourceClaim", version, "resourceclaims")
