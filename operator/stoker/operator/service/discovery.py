"""What an API server knows for gangs, schedulers and devices by claim, from its list of API groups.

One small request, and a second one only where Kubernetes' alpha scheduling API is on. Called by `program`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.operator.cluster.interface import NotFound
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.domain.schedulers import Installed
from stoker.pod.resources.device import GROUP, readable_version

SCHEDULING = "scheduling.k8s.io"


async def discover(connection: ApiConnection) -> Installed:
    """Ask the API server. Raises ClusterError."""
    groups = versions_by_group(await connection.request("GET", "/apis", resource="apis"))
    return Installed(
        kueue="kueue.x-k8s.io" in groups,
        volcano="v1beta1" in groups.get("scheduling.volcano.sh", ()),
        pod_groups=await _pod_groups(connection, groups.get(SCHEDULING, ())),
        devices=readable_version(groups.get(GROUP, ())),
    )


def versions_by_group(answer: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The served versions of each group of an APIGroupList, preferred ones first."""
    return {
        str(group["name"]): tuple(str(version["version"]) for version in group.get("versions") or ())
        for group in answer.get("groups") or ()
    }


async def _pod_groups(connection: ApiConnection, versions: tuple[str, ...]) -> str:
    """apiVersion with Kubernetes' own PodGroup; v1 has priority classes only, so it is not asked."""
    for version in versions:
        if version != "v1" and await _has_pod_groups(connection, f"{SCHEDULING}/{version}"):
            return f"{SCHEDULING}/{version}"
    return ""


async def _has_pod_groups(connection: ApiConnection, api_version: str) -> bool:
    try:
        answer = await connection.request("GET", f"/apis/{api_version}", resource="apis")
    except NotFound:
        return False
    return any(found["name"] == "podgroups" for found in answer.get("resources") or ())
