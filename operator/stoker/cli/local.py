"""`stoker local`: manifests on this machine. Every verb calls a supervisor; `apply` starts one if none runs.

Owns the verbs and their options; the state belongs to the supervisor, reached through `supervisor_client`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from stoker.cli.exit_status import FAILED, WRONG_INPUT
from stoker.cli.local_apply import apply
from stoker.cli.local_gateway import gateway
from stoker.cli.local_logs import logs
from stoker.cli.local_options import ask, open_client, state_option
from stoker.cli.local_plot import plot_local
from stoker.cli.local_verbs import delete, describe, get, scale
from stoker.cli.seconds import SECONDS
from stoker.cli.supervisor_client import NotRunning, SupervisorError
from stoker.cli.targets import fail
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.state_lock import StateFolderTaken, lock_state


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nExamples:\n  stoker local apply -f examples/quickstart/ --detach\n  stoker local get tj",
)
def local() -> None:
    """Run manifests on this machine without Kubernetes.

    The embedded cluster runs the same operator; each pod is a group of local processes.
    """


local.add_command(apply)
local.add_command(get)
local.add_command(describe)
local.add_command(logs)
local.add_command(delete)
local.add_command(scale)
local.add_command(gateway)
local.add_command(plot_local)


@local.command(epilog="\b\nExamples:\n  stoker local down\n  stoker local down --purge")
@click.option(
    "--grace",
    "grace_s",
    type=SECONDS,
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
