"""The GPUs of dynamic resource allocation, read with the caller's own rights where the API server has them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

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


async def claims_of_pods(cluster: Cluster, namespace: str, pods: Iterable[Object]) -> tuple[ClaimedGpus, str]:
    """Read the claims of a namespace where a pod has some; with the reason where the caller may not read them."""
    if not any(pod["spec"].get("resourceClaims") for pod in pods):
        return ClaimedGpus(), ""
    try:
        if not (version := readable_version(await cluster.versions(GROUP))):
            return ClaimedGpus(), ""
        claims, _ = await list_all(cluster, _claim_kind(version), Selection(namespace))
    except ApiError as error:
        if error.status != 403:
            raise
        return ClaimedGpus(), f"GPUs of the pod's claims are not known: {error}"
    return ClaimedGpus((), claims), ""


def _claim_kind(version: str) -> Kind:
    return Kind("ResourceClaim", version, "resourceclaims")
