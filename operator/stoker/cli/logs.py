"""`stoker logs`: the logs of the pods of an object of a cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.context import cluster_options, note, opened
from stoker.cli.exit_status import FAILED, INTERRUPTED
from stoker.cli.follow_scope import name_of
from stoker.cli.log_options import timed_log_options
from stoker.cli.log_selection import LogSelection, NoSuchLog, has_ended
from stoker.cli.object_names import TARGETS
from stoker.cli.object_source import Missing, named
from stoker.cli.targets import Target, belongs_to, fail, kind_of, log_target, prefixed
from stoker.pod.log_source import Look
from stoker.pod.whole_lines import WholeLines

if TYPE_CHECKING:
    from stoker.cli.cluster_client import ClusterClient


@click.command(
    epilog="\b\nExamples:\n  stoker logs tj/teach -f\n  stoker logs tj/teach --rank 3 --tail 50\n"
    "  stoker logs tj/teach --previous\n  stoker logs teach-7eedf-a0-0 --since 5m"
)
@click.argument("target", type=TARGETS)
@timed_log_options
@cluster_options
def logs(
    target: str, selection: LogSelection, namespace: str | None, context: str | None, kubeconfig: str | None
) -> None:
    """Print the log of a pod.

    TARGET is a pod, or KIND/NAME for all pods of a job, checkpoint or deployment. Of a job these are the pods of its
    newest attempt; with --follow those of the attempts that come after it too, until the job has ended.
    """
    wanted = log_target(target)
    with opened(namespace, context, kubeconfig) as client:
        if "/" not in target:
            _propose_kind(client, target)
        owner = named(client, wanted)
        try:
            print_logs(client, owner, selection)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


def _propose_kind(client: ClusterClient, name: str) -> None:
    """End the command where a name without a kind is no pod's, but that of a job or a deployment."""
    missing = client.find(Target(kind_of("pod"), name))
    if not isinstance(missing, Missing):
        return
    for word in ("tj", "infd"):
        if not isinstance(client.find(Target(kind_of(word), name)), Missing):
            fail(f"{missing.reason}; did you mean {word}/{name}?", FAILED)


def print_logs(client: ClusterClient, owner: dict[str, Any], selection: LogSelection) -> None:
    """Print the logs of an object's pods; ends the command where there are none."""
    try:
        selection.check_rank(owner)
        if selection.follow:
            _follow(client, owner, selection)
        else:
            _read(client, owner, selection)
    except NoSuchLog as error:
        fail(str(error), FAILED)


def _read(client: ClusterClient, owner: dict[str, Any], selection: LogSelection) -> None:
    from stoker.operator.cluster.interface import Invalid, NotFound

    pods = [dict(pod) for pod in selection.pods_of(_own_pods(client.objects("Pod"), owner))]
    if not pods:
        fail(f"{owner['kind'].lower()}/{owner['metadata']['name']} has no pods", FAILED)
    for pod in pods:
        name, cutter = str(pod["metadata"]["name"]), WholeLines()
        try:
            content = client.log(pod, selection.request)
        except (Invalid, NotFound):  # its container has not started, or it has gone meanwhile
            click.echo(f"pod {name} has no log yet", err=True)
            continue
        _print(selection.last_of([*cutter.cut(content), *cutter.last()]), name if len(pods) > 1 else "")


def _follow(client: ClusterClient, owner: dict[str, Any], selection: LogSelection) -> None:
    only = selection.attempt is not None or selection.previous or owner["kind"] == "Pod"
    uid = owner["metadata"]["uid"]

    def choose(pods: list[dict[str, Any]], now: dict[str, Any] | None) -> Look:
        own = _own_pods(pods, owner)
        chosen = selection.pods_of(own) if own or only else []
        ended = only or now is None or now["metadata"]["uid"] != uid or has_ended(now)
        return Look(own, {pod["metadata"]["uid"] for pod in chosen}, ended)

    for pod, lines, several in client.follow_logs(name_of(owner), choose, selection, note):
        _print(selection.lines_of(lines), pod if several else "")


def _own_pods(pods: list[dict[str, Any]], owner: dict[str, Any]) -> list[dict[str, Any]]:
    uid = owner["metadata"]["uid"]
    if owner["kind"] == "Pod":
        return [pod for pod in pods if pod["metadata"]["uid"] == uid]
    return [pod for pod in pods if belongs_to(uid, pod)]


def _print(lines: Any, pod: str) -> None:
    for line in lines:
        click.echo(prefixed(line, f"[{pod}] " if pod else ""))
