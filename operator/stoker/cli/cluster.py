"""Verbs against a Kubernetes cluster: submit, get, describe, logs, delete. They print as `stoker local` does."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.context import cluster_options, opened
from stoker.cli.exit_status import FAILED, INTERRUPTED, WRONG_INPUT
from stoker.cli.manifest_options import files_option
from stoker.cli.targets import belongs_to, fail, kind_of, named_once, named_or_filed, prefixed

if TYPE_CHECKING:
    from stoker.cli.cluster_client import ClusterClient

OVERVIEW = ("trainingjobs", "checkpoints", "inferencedeployments")
"""Kinds that `get` lists when none is named."""
LOOK_S = 1.0


@click.command(epilog="\b\nExamples:\n  stoker submit -f train.yaml\n  stoker submit -f train.yaml --wait -n research")
@files_option(required=False)
@click.option("--wait", is_flag=True, help="Follow until everything has completed or serves; exit code 1 if not.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), help="Longest time to wait, in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@cluster_options
def submit(
    files: tuple[Path, ...],
    wait: bool,
    timeout_s: float | None,
    as_json: bool,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """Create or change objects of a cluster."""
    if not files:
        raise click.UsageError("give -f FILE")
    with opened(namespace, context, kubeconfig) as client:
        objects = _manifests(files, client.own_namespace)
        code = _apply(client, objects, as_json=as_json)
        if code == 0 and wait:
            code = _follow(client, objects, timeout_s=timeout_s, as_json=as_json)
    sys.exit(code)


@click.command(epilog="\b\nExamples:\n  stoker get\n  stoker get tj -A\n  stoker get ckpt --json")
@click.argument("kind", required=False)
@click.argument("name", required=False)
@click.option("-A", "--all-namespaces", is_flag=True, help="Objects of all namespaces.")
@click.option("--json", "as_json", is_flag=True, help="Print whole objects as JSON.")
@cluster_options
def get(
    kind: str | None,
    name: str | None,
    all_namespaces: bool,
    as_json: bool,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """List objects of a cluster.

    KIND is one of tj, ckpt, infd, epool, pods, services, pvc, events. Without it: jobs, checkpoints and deployments.
    """
    from stoker.cli.printers import aligned, table, utc_now

    word, chosen = named_once(kind, name) if kind is not None else (None, None)
    kinds = [kind_of(one) for one in (OVERVIEW if word is None else (word,))]
    with opened(namespace, context, kubeconfig, all_namespaces=all_namespaces) as client:
        found = {one: client.objects(one.name, name=chosen) for one in kinds}
        where = "any namespace" if all_namespaces else f"namespace {client.own_namespace}"
    if as_json:
        click.echo(json.dumps({"items": [item for items in found.values() for item in items]}, indent=1))
        return
    shown = {
        one: [_placed(item) if all_namespaces else item for item in items] for one, items in found.items() if items
    }
    if shown:
        click.echo("\n\n".join(aligned(table(one.name, items, utc_now())) for one, items in shown.items()))
    else:
        what = kinds[0].plural if len(kinds) == 1 else "jobs, checkpoints and deployments"
        click.echo(f"no {what} in {where}", err=True)


@click.command(epilog="\b\nExample:\n  stoker describe tj teach")
@click.argument("kind")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the object and its events as JSON.")
@cluster_options
def describe(
    kind: str, name: str | None, as_json: bool, namespace: str | None, context: str | None, kubeconfig: str | None
) -> None:
    """Show one object of a cluster with its events."""
    from stoker.cli.printers import described, utc_now

    word, chosen = named_once(kind, name)
    if not chosen:
        raise click.UsageError("give KIND NAME, or KIND/NAME")
    with opened(namespace, context, kubeconfig) as client:
        found = client.get(kind_of(word).name, chosen)
        uid = found["metadata"]["uid"]
        events = [one for one in client.objects("Event") if (one.get("involvedObject") or {}).get("uid") == uid]
    events.sort(key=lambda event: str(event.get("lastTimestamp")))
    facts = {"object": found, "events": events}
    click.echo(json.dumps(facts, indent=1) if as_json else described(found, events, utc_now()))


@click.command(epilog="\b\nExamples:\n  stoker logs tj/teach -f\n  stoker logs teach-7eedf-a0-0 --tail 20")
@click.argument("target")
@click.option("-f", "--follow", is_flag=True, help="Print new lines until every pod has ended.")
@click.option("--tail", type=click.IntRange(min=0), help="Only the last lines of each pod.")
@cluster_options
def logs(
    target: str, follow: bool, tail: int | None, namespace: str | None, context: str | None, kubeconfig: str | None
) -> None:
    """Print the log of a pod.

    TARGET is a pod, or KIND/NAME for all pods of a job, checkpoint or deployment.
    """
    with opened(namespace, context, kubeconfig) as client:
        pods = _pods_of(client, target)
        try:
            for pod, lines in client.logs(pods, follow=follow, tail=tail):
                click.echo(prefixed(lines.decode(errors="replace"), f"[{pod}] " if len(pods) > 1 else ""), nl=False)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


@click.command(epilog="\b\nExamples:\n  stoker delete tj teach\n  stoker delete -f train.yaml")
@click.argument("kind", required=False)
@click.argument("names", nargs=-1)
@files_option(required=False)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the objects are gone.")
@cluster_options
def delete(
    kind: str | None,
    names: tuple[str, ...],
    files: tuple[Path, ...],
    wait: bool,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """Delete objects of a cluster.

    KIND NAME..., KIND/NAME or -f FILE. The data of a checkpoint stays unless its deletionPolicy is Delete.
    """
    kind, names = named_or_filed(kind, names, files)
    with opened(namespace, context, kubeconfig) as client:
        if kind:
            targets = [(kind_of(kind).name, client.own_namespace, name) for name in names]
        else:
            found = reversed(_manifests(files, client.own_namespace))
            targets = [(o["kind"], o["metadata"]["namespace"], o["metadata"]["name"]) for o in found]
        missing = sum(_delete(client, *target, wait=wait) for target in targets)
    sys.exit(FAILED if missing and kind else 0)


def _manifests(files: Sequence[Path], namespace: str) -> list[dict[str, Any]]:
    from stoker.cli.manifests import ManifestError, read_manifests

    try:
        return read_manifests(files, namespace)
    except ManifestError as error:
        fail(str(error), WRONG_INPUT)


def _apply(client: ClusterClient, objects: list[dict[str, Any]], *, as_json: bool) -> int:
    """Apply each object on its own and print a line for each; the exit code."""
    from stoker.operator.cluster.interface import ClusterError, Invalid

    code = 0
    for body in objects:
        about = {"kind": kind_of(body["kind"]).name, "name": body["metadata"]["name"]}
        try:
            result, _ = client.apply(body)
            error = ""
        except ClusterError as refused:
            result, error = "refused" if isinstance(refused, Invalid) else "failed", str(refused)
            code = max(code, WRONG_INPUT if isinstance(refused, Invalid) else FAILED)
        text = f"{about['kind'].lower()}/{about['name']} {result}{f': {error}' if error else ''}"
        line = json.dumps({**about, "result": result, **({"error": error} if error else {})})
        click.echo(line if as_json else text, err=bool(error) and not as_json)
    return code


def _follow(client: ClusterClient, objects: list[dict[str, Any]], *, timeout_s: float | None, as_json: bool) -> int:
    from stoker.cli.interruption import Interruption
    from stoker.cli.printers import FOLLOWED, utc_now
    from stoker.cli.progress import Follower, Name, screen_for

    wanted = [
        Name(o["kind"], o["metadata"]["namespace"], o["metadata"]["name"]) for o in objects if o["kind"] in FOLLOWED
    ]
    since = f"{utc_now():%Y-%m-%dT%H:%M:%SZ}"
    try:
        with Interruption() as interruption, closing(screen_for(as_json=as_json)) as screen:
            follower = Follower(client, screen, wanted, since=since, sleep=interruption.sleep)
            outcome = follower.until_settled(timeout_s)
            if outcome is None:
                screen.say(f"not settled after {timeout_s:g} s")
            return 0 if outcome else FAILED
    except KeyboardInterrupt:
        click.echo("\nStill running on the cluster", err=True)
        return INTERRUPTED


def _pods_of(client: ClusterClient, target: str) -> list[dict[str, Any]]:
    kind_word, slash, name = target.rpartition("/")
    kind = kind_of(kind_word) if slash else kind_of("pod")
    found = client.get(kind.name, name)
    if kind.name == "Pod":
        return [found]
    own = [pod for pod in client.objects("Pod") if belongs_to(found["metadata"]["uid"], pod)]
    if not own:
        fail(f"{target} has no pods", FAILED)
    return own


def _delete(client: ClusterClient, kind: str, namespace: str, name: str, *, wait: bool) -> int:
    """Delete one object; 0 when it is being deleted, 1 when it does not exist."""
    from stoker.operator.cluster.interface import NotFound

    try:
        found = client.get(kind, name, namespace)
        gone = client.delete(found)
        while wait and not gone:
            time.sleep(LOOK_S)
            gone = client.get(kind, name, namespace)["metadata"]["uid"] != found["metadata"]["uid"]
    except NotFound as error:
        if "found" not in locals():
            click.echo(str(error), err=True)
            return 1
        gone = True
    click.echo(f"{kind.lower()}/{name} {'deleted' if gone else 'is being deleted'}")
    return 0


def _placed(item: dict[str, Any]) -> dict[str, Any]:
    """An object that shows its namespace in its name."""
    metadata = item["metadata"]
    return {**item, "metadata": {**metadata, "name": f"{metadata.get('namespace', '')}/{metadata['name']}"}}
