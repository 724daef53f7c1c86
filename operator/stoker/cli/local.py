"""`stoker local`: manifests on this machine. Every verb calls a supervisor; `apply` starts one if none runs.

Owns the verbs and their options; the state belongs to the supervisor, reached through `supervisor_client`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from stoker.cli.exit_status import FAILED, INTERRUPTED, WRONG_INPUT
from stoker.cli.local_apply import apply
from stoker.cli.local_endpoints import reached_from_here
from stoker.cli.local_gateway import gateway
from stoker.cli.local_objects import named_in
from stoker.cli.local_options import ask, namespace_option, open_client, state_option
from stoker.cli.local_plot import plot_local
from stoker.cli.manifest_options import files_option
from stoker.cli.supervisor_client import NOT_FOUND, NotRunning, SupervisorClient, SupervisorError
from stoker.cli.targets import belongs_to, fail, kind_of, named_once, named_or_filed, prefixed
from stoker.operator.cluster.kinds import Kind
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.state_lock import StateFolderTaken, lock_state

F = TypeVar("F", bound=Callable[..., Any])

FOLLOW_LOGS_S = 0.3
OVERVIEW = ("trainingjobs", "checkpoints", "inferencedeployments", "pods")
"""Kinds that `get` lists when none is named."""


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nExamples:\n  stoker local apply -f examples/quickstart/ --detach\n  stoker local get tj",
)
def local() -> None:
    """Run manifests on this machine without Kubernetes.

    The embedded cluster runs the same operator; each pod is a group of local processes.
    """


local.add_command(apply)
local.add_command(gateway)
local.add_command(plot_local)


@local.command(epilog="\b\nExamples:\n  stoker local get\n  stoker local get tj\n  stoker local get pods --json")
@click.argument("kind", required=False)
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print whole objects as JSON.")
@namespace_option
@state_option
def get(kind: str | None, name: str | None, as_json: bool, namespace: str, state: Path | None) -> None:
    """List objects.

    KIND is one of tj, ckpt, infd, epool, pods, services, configmaps, secrets, pvc, events. Without it: jobs,
    checkpoints, deployments and pods. KIND NAME or KIND/NAME lists one object.
    """
    from stoker.cli.printers import aligned, table, utc_now

    client = open_client(state)
    word, name = named_once(kind, name) if kind is not None else (None, None)
    kinds = [kind_of(one) for one in (OVERVIEW if word is None else (word,))]
    found: dict[Kind, list[dict[str, Any]]] = {}
    for one in kinds:
        items = ask(lambda one=one: client.objects(one.name, namespace=namespace, name=name))  # type: ignore[misc]
        found[one] = reached_from_here(client, items) if one.name == "InferenceDeployment" and not as_json else items
    if as_json:
        click.echo(json.dumps({"items": [item for items in found.values() for item in items]}, indent=1))
        _warn(client)
        return
    tables = [aligned(table(one.name, items, utc_now())) for one, items in found.items() if items]
    if tables:
        click.echo("\n\n".join(tables))
    else:
        what = kinds[0].plural if len(kinds) == 1 else "jobs, checkpoints, deployments and pods"
        click.echo(f"no {what} in namespace {namespace}", err=True)
    _warn(client)


@local.command(epilog="\b\nExample:\n  stoker local describe tj teach")
@click.argument("kind")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the object and its events as JSON.")
@namespace_option
@state_option
def describe(kind: str, name: str | None, as_json: bool, namespace: str, state: Path | None) -> None:
    """Show one object with its events.

    KIND NAME or KIND/NAME. The page holds labels, conditions, status, spec and events.
    """
    from stoker.cli.printers import described, utc_now

    word, chosen = named_once(kind, name)
    if not chosen:
        raise click.UsageError("give KIND NAME, or KIND/NAME")
    client = open_client(state)
    found = ask(lambda: client.objects(kind_of(word).name, namespace=namespace, name=chosen))[0]
    uid = found["metadata"]["uid"]
    all_events = ask(lambda: client.objects("Event", namespace=namespace))
    events = [event for event in all_events if event["involvedObject"].get("uid") == uid]
    events.sort(key=lambda event: str(event.get("lastTimestamp")))
    click.echo(
        json.dumps({"object": found, "events": events}, indent=1) if as_json else described(found, events, utc_now())
    )


@local.command(epilog="\b\nExamples:\n  stoker local logs tj/teach -f\n  stoker local logs teach-7eedf-a0-0")
@click.argument("target")
@click.option("-f", "--follow", is_flag=True, help="Print new lines until the pod ends.")
@namespace_option
@state_option
def logs(target: str, follow: bool, namespace: str, state: Path | None) -> None:
    """Print the log of a pod.

    TARGET is a pod, or KIND/NAME for all pods of a job, checkpoint or deployment.
    """
    client = open_client(state)
    pods = ask(lambda: _pods_of(client, target, namespace))
    offsets = dict.fromkeys(pods, 0)
    prefix = len(pods) > 1
    try:
        while offsets:
            for pod in list(offsets):
                part = ask(lambda pod=pod: client.logs(namespace, pod, offsets[pod]))  # type: ignore[misc]
                click.echo(prefixed(part["text"], f"[{pod}] " if prefix else ""), nl=False)
                offsets[pod] = part["offset"]
                if part["ended"] or not (follow or part["text"]):
                    del offsets[pod]
            if follow and offsets:
                time.sleep(FOLLOW_LOGS_S)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


@local.command(epilog="\b\nExamples:\n  stoker local delete tj teach\n  stoker local delete -f examples/quickstart/")
@click.argument("kind", required=False)
@click.argument("names", nargs=-1)
@files_option("Delete the objects of these manifests. May be repeated.", required=False)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the objects are gone.")
@namespace_option
@state_option
def delete(
    kind: str | None, names: tuple[str, ...], files: tuple[Path, ...], wait: bool, namespace: str, state: Path | None
) -> None:
    """Delete objects.

    KIND NAME..., KIND/NAME or -f FILE. The data of a checkpoint stays unless its deletionPolicy is Delete.
    """
    kind, names = named_or_filed(kind, names, files)
    client = open_client(state)
    targets = [(kind_of(kind).name, namespace, name) for name in names] if kind else named_in(files, namespace)
    missing = 0
    for target in targets:
        missing += _delete(client, *target, wait=wait)
    sys.exit(FAILED if missing and kind else 0)


@local.command(epilog="\b\nExamples:\n  stoker local down\n  stoker local down --purge")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    help="Longest grace period of a pod, in seconds [default: its own].",
)
@click.option(
    "--purge",
    is_flag=True,
    help="Also delete the state folder: objects, logs, and checkpoints in claims without a folder of their own.",
)
@state_option
def down(grace_s: float | None, purge: bool, state: Path | None) -> None:
    """Stop every pod and the supervisor. The state stays; the next apply continues from it.

    Nothing is deleted while a supervisor holds the state folder.
    """
    client = open_client(state)
    unchanged = "; nothing was deleted" if purge else ""
    try:
        client.down(grace_s)
    except NotRunning as error:
        click.echo(str(error), err=True)
    except SupervisorError as error:
        fail(f"{error}{unchanged}", FAILED)
    if purge and client.folders.root.exists():
        _purge(client.folders)


@local.command(epilog="\b\nExample:\n  stoker local status --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@state_option
def status(as_json: bool, state: Path | None) -> None:
    """Show the supervisor and its state folder.

    Also shows problems of the folder, and the address of every Service.

    Exit code 1 when no supervisor runs.
    """
    facts = ask(lambda: open_client(state).status())
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for name in ("state", "pid", "startedAt", "addresses", "pods", "detached"):
        click.echo(f"{name + ':':11} {facts[name]}")
    for service, url in facts["endpoints"].items():
        click.echo(f"endpoint:   {url}  ({service})")
    for problem in facts.get("problems", ()):  # a supervisor of an earlier version has none
        click.echo(f"problem:    {problem}")


# What the verbs share


def _purge(folders: StateFolders) -> None:
    """Delete a state folder while its lock is held, so that no supervisor can be using it."""
    if not (folders.lock.exists() or (folders.objects.is_dir() and folders.supervisor_log.exists())):
        fail(f"{folders.root} is not a state folder of stoker local; nothing was deleted", WRONG_INPUT)
    try:
        with lock_state(folders):
            shutil.rmtree(folders.root)
    except StateFolderTaken as taken:
        fail(f"{taken}; nothing was deleted", FAILED)
    click.echo(f"deleted {folders.root}")


def _warn(client: SupervisorClient) -> None:
    """Print what is wrong with the state folder."""
    for problem in client.problems:
        click.echo(f"warning: {problem}", err=True)


def _pods_of(client: SupervisorClient, target: str, namespace: str) -> list[str]:
    kind_word, slash, name = target.rpartition("/")
    if not slash:
        return [target]
    kind = kind_of(kind_word)
    if kind.name == "Pod":
        return [name]
    owner = client.objects(kind.name, namespace=namespace, name=name)[0]
    uid = owner["metadata"]["uid"]
    own = [pod for pod in client.objects("Pod", namespace=namespace) if belongs_to(uid, pod)]
    if not own:
        raise SupervisorError(f"{target} has no pods")
    return [pod["metadata"]["name"] for pod in own]


def _delete(client: SupervisorClient, kind: str, namespace: str, name: str, *, wait: bool) -> int:
    """Delete one object; 0 when it is being deleted, 1 when it does not exist."""
    try:
        gone = client.delete(kind, namespace, name)
    except NotRunning as error:
        fail(str(error), FAILED)
    except SupervisorError as error:
        if error.status != NOT_FOUND:
            fail(str(error), FAILED)
        click.echo(str(error), err=True)
        return 1
    while wait and not gone:
        time.sleep(0.1)
        gone = not [o for o in ask(lambda: client.objects(kind, namespace=namespace)) if o["metadata"]["name"] == name]
    click.echo(f"{kind.lower()}/{name} {'deleted' if gone else 'is being deleted'}")
    return 0
