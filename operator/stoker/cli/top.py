"""`stoker top`: the GPUs of the nodes, and the jobs and deployments that use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.context import cluster_options, opened

if TYPE_CHECKING:
    from stoker.cli.cluster_client import ClusterClient
    from stoker.gateway.domain.capacity import NodeCapacity
    from stoker.gateway.domain.claimed_gpus import ClaimedGpus

PARTS = ("nodes", "jobs", "deployments")
UNKNOWN = "?"
"""GPUs of an object with claims that the user may not read."""


@click.command(epilog="\b\nExamples:\n  stoker top -A\n  stoker top nodes\n  stoker top jobs -n research")
@click.argument("part", required=False, type=click.Choice(PARTS))
@click.option("-A", "--all-namespaces", is_flag=True, help="Jobs and deployments of all namespaces.")
@cluster_options
def top(
    part: str | None, all_namespaces: bool, namespace: str | None, context: str | None, kubeconfig: str | None
) -> None:
    """Show the GPUs of the nodes, and the jobs and deployments that run.

    GPUs of a job or deployment are those that its pods ask for.
    """
    from stoker.cli.printers import colour_of
    from stoker.cli.text_style import aligned, style_of

    wanted = PARTS if part is None else (part,)
    style = style_of()
    texts = []
    with opened(namespace, context, kubeconfig, all_namespaces=all_namespaces) as client:
        if "nodes" in wanted and (rows := _node_rows(client, needed=part is not None)):
            texts.append(aligned(rows, style))
        pods = client.objects("Pod") if part != "nodes" else []
        count = _gpu_counter(client, pods)
        for name, kind, header, row in _TABLES:
            if name in wanted:
                found = [item for item in client.objects(kind) if is_at_work(item)]
                if not found and part is not None:
                    texts.append(f"no {name} that have not ended in {client.place}")
                    continue
                body = [_placed(item, row(item, count(item)), namespaced=all_namespaces) for item in found]
                title = ["NAMESPACE", *header] if all_namespaces else header
                texts.append(aligned([title, *body], style, [colour_of(item) for item in found]))
    click.echo("\n\n".join(texts))


def _node_rows(client: ClusterClient, *, needed: bool) -> list[list[str]]:
    """The heading and a row for each node; nothing without nodes.

    Users of one namespace may not list nodes: unless `needed`, that is only a note.
    """
    from stoker.gateway.domain.capacity import NO_CLAIMS, capacities
    from stoker.operator.cluster.interface import Forbidden

    try:
        claimed = _claimed_gpus(client, everywhere=True) or NO_CLAIMS
        found = capacities(client.objects("Node"), client.everywhere("Pod"), claimed)
    except Forbidden as error:
        if needed:
            raise
        click.echo(f"nodes are not shown: {error}", err=True)
        return []
    if not found:
        return []
    rows = [[one.name, one.status, str(one.gpus), str(one.available_gpus), _gpu_kinds(one)] for one in found]
    named = any(row[-1] for row in rows)
    heading = ["NODE", "STATUS", "GPUS", "FREE", "FREE BY RESOURCE"]
    return [row if named else row[:-1] for row in (heading, *rows)]


def _gpu_kinds(node: NodeCapacity) -> str:
    """Free GPUs by name where some are no `nvidia.com/gpu`: MIG devices, those of drivers."""
    from stoker.pod.resources.gpu import GPU

    if all(one.name == GPU for one in node.gpu_resources):
        return ""
    return ", ".join(f"{one.available}/{one.total} {one.name}" for one in node.gpu_resources)


def _claimed_gpus(client: ClusterClient, *, everywhere: bool) -> ClaimedGpus | None:
    """GPUs of dynamic resource allocation; None, with a note, where the user may not read them."""
    from stoker.gateway.domain.claimed_gpus import ClaimedGpus
    from stoker.operator.cluster.interface import Forbidden

    try:
        return ClaimedGpus(*client.devices_and_claims(everywhere=everywhere))
    except Forbidden as error:
        click.echo(f"GPUs of dynamic resource allocation are not counted: {error}", err=True)
        return None


def is_at_work(found: Mapping[str, Any]) -> bool:
    """Whether an object may still use a GPU."""
    return (found.get("status") or {}).get("phase") not in ("Completed", "Failed", "Cancelled")


def _gpu_counter(client: ClusterClient, pods: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], str]:
    """Return what counts the GPUs that the pods of an object ask for and have not given back.

    It counts `?` where a pod has claims that the user may not read.
    """
    from stoker.cli.targets import belongs_to
    from stoker.gateway.domain.capacity import ENDED, NO_CLAIMS, gpus_of_pod

    claiming = any(pod["spec"].get("resourceClaims") for pod in pods)
    claimed = _claimed_gpus(client, everywhere=False) if claiming else NO_CLAIMS

    def count(found: Mapping[str, Any]) -> str:
        own = [pod for pod in pods if belongs_to(found["metadata"]["uid"], pod)]
        alive = [pod for pod in own if (pod.get("status") or {}).get("phase") not in ENDED]
        if claimed is None and any(pod["spec"].get("resourceClaims") for pod in alive):
            return UNKNOWN
        return str(sum(gpus_of_pod(pod, claimed or NO_CLAIMS) for pod in alive))

    return count


def _job_row(job: Mapping[str, Any], gpus: str) -> list[str]:
    status = job.get("status") or {}
    progress = status.get("progress") or {}
    step = "/".join(str(progress[name]) for name in ("step", "totalSteps") if progress.get(name) is not None)
    phase, speed = str(status.get("phase") or "Pending"), str(progress.get("tokensPerSecond") or "")
    ranks, message = str(status.get("worldSize") or ""), " ".join(str(status.get("message") or "").split())
    return [job["metadata"]["name"], phase, ranks, gpus, step, speed, message]


def _deployment_row(found: Mapping[str, Any], gpus: str) -> list[str]:
    status = found.get("status") or {}
    message = " ".join(str(status.get("message") or "").split())
    phase, ready = str(status.get("phase") or "Pending"), str(status.get("ready") or "")
    return [found["metadata"]["name"], phase, ready, gpus, message]


_TABLES = (
    ("jobs", "TrainingJob", ["JOB", "PHASE", "RANKS", "GPUS", "STEP", "TOKENS/S", "MESSAGE"], _job_row),
    ("deployments", "InferenceDeployment", ["DEPLOYMENT", "PHASE", "READY", "GPUS", "MESSAGE"], _deployment_row),
)


def _placed(item: Mapping[str, Any], row: list[str], *, namespaced: bool) -> list[str]:
    return [item["metadata"]["namespace"], *row] if namespaced else row
