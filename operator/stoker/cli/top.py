"""`stoker top`: the GPUs of the nodes, and the jobs and deployments that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.context import cluster_options, opened

if TYPE_CHECKING:
    from stoker.cli.cluster_client import ClusterClient

PARTS = ("nodes", "jobs", "deployments")


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
            texts.append(aligned([["NODE", "STATUS", "GPUS", "FREE"], *rows], style))
        pods = client.objects("Pod") if part != "nodes" else []
        for name, kind, header, row in _TABLES:
            if name in wanted:
                found = [item for item in client.objects(kind) if is_at_work(item)]
                if not found and part is not None:
                    texts.append(f"no {name} that have not ended in {client.place}")
                    continue
                body = [_placed(item, row(item, pods), namespaced=all_namespaces) for item in found]
                title = ["NAMESPACE", *header] if all_namespaces else header
                texts.append(aligned([title, *body], style, [colour_of(item) for item in found]))
    click.echo("\n\n".join(texts))


def _node_rows(client: ClusterClient, *, needed: bool) -> list[list[str]]:
    """A row for each node. Users of one namespace may not list nodes: unless `needed`, that is only a note."""
    from stoker.gateway.domain.capacity import capacities
    from stoker.operator.cluster.interface import Forbidden

    try:
        found = capacities(client.objects("Node"), client.everywhere("Pod"))
    except Forbidden as error:
        if needed:
            raise
        click.echo(f"nodes are not shown: {error}", err=True)
        return []
    return [[one.name, one.status, str(one.gpus), str(one.available_gpus)] for one in found]


def is_at_work(found: Mapping[str, Any]) -> bool:
    """Whether an object may still use a GPU."""
    return (found.get("status") or {}).get("phase") not in ("Completed", "Failed", "Cancelled")


def gpus_of(found: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> int:
    """GPUs that the pods of an object ask for and have not given back."""
    from stoker.cli.targets import belongs_to
    from stoker.gateway.domain.capacity import ENDED, asked_gpus

    uid = found["metadata"]["uid"]
    own = [pod for pod in pods if belongs_to(uid, pod)]
    return sum(asked_gpus(pod) for pod in own if (pod.get("status") or {}).get("phase") not in ENDED)


def _job_row(job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> list[str]:
    status = job.get("status") or {}
    progress = status.get("progress") or {}
    step = "/".join(str(progress[name]) for name in ("step", "totalSteps") if progress.get(name) is not None)
    phase, speed = str(status.get("phase") or "Pending"), str(progress.get("tokensPerSecond") or "")
    ranks, message = str(status.get("worldSize") or ""), " ".join(str(status.get("message") or "").split())
    return [job["metadata"]["name"], phase, ranks, str(gpus_of(job, pods)), step, speed, message]


def _deployment_row(found: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> list[str]:
    status = found.get("status") or {}
    message = " ".join(str(status.get("message") or "").split())
    phase, ready = str(status.get("phase") or "Pending"), str(status.get("ready") or "")
    return [found["metadata"]["name"], phase, ready, str(gpus_of(found, pods)), message]


_TABLES = (
    ("jobs", "TrainingJob", ["JOB", "PHASE", "RANKS", "GPUS", "STEP", "TOKENS/S", "MESSAGE"], _job_row),
    ("deployments", "InferenceDeployment", ["DEPLOYMENT", "PHASE", "READY", "GPUS", "MESSAGE"], _deployment_row),
)


def _placed(item: Mapping[str, Any], row: list[str], *, namespaced: bool) -> list[str]:
    return [item["metadata"]["namespace"], *row] if namespaced else row
