"""`stoker submit`: create or change objects of a cluster, and follow them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.context import cluster_options, note, opened
from stoker.cli.exit_status import FAILED, INTERRUPTED, WRONG_INPUT
from stoker.cli.manifest_options import files_option, set_option
from stoker.cli.seconds import SECONDS
from stoker.cli.targets import fail, kind_of

if TYPE_CHECKING:
    from stoker.cli.cluster_client import ClusterClient


@click.command(
    epilog="\b\nExamples:\n  stoker submit -f train.yaml\n  stoker submit -f train.yaml --wait -n research\n"
    "  stoker submit -f train.yaml --set spec.training.totalSteps=200 --dry-run\n"
    "  stoker submit -f train.yaml --follow"
)
@files_option(required=False)
@set_option
@click.option("--dry-run", is_flag=True, help="Let the cluster check everything, and store nothing.")
@click.option("--wait", is_flag=True, help="End when everything has completed or serves; exit code 1 if not.")
@click.option("--follow", is_flag=True, help="Print the log of the job until it ends; exit code 1 if it fails.")
@click.option("--timeout", "timeout_s", type=SECONDS, help="Longest time of --wait, in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@cluster_options
def submit(
    files: tuple[Path, ...],
    settings: tuple[str, ...],
    dry_run: bool,
    wait: bool,
    follow: bool,
    timeout_s: float | None,
    as_json: bool,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """Create or change objects of a cluster."""
    if not files:
        raise click.UsageError("give -f FILE")
    _check_options(dry_run=dry_run, wait=wait, follow=follow, as_json=as_json, timeout_s=timeout_s)
    with opened(namespace, context, kubeconfig) as client:
        objects = manifests_with(files, settings, client.own_namespace)
        code = _apply(client, objects, dry_run=dry_run, as_json=as_json)
        if code == 0 and wait:
            code = _wait(client, objects, timeout_s=timeout_s, as_json=as_json)
        elif code == 0 and follow:
            code = _follow_log(client, objects)
    sys.exit(code)


def manifests_with(files: Sequence[Path], settings: Sequence[str], namespace: str) -> list[dict[str, Any]]:
    """Read manifests with the overrides of --set; ends the command where either is wrong.

    Those whose namespace an override takes away are in `namespace`, as those that name none.
    """
    from stoker.cli.manifests import manifests_or_end, placed_in
    from stoker.cli.overrides import WrongOverride, override, parse_override

    try:
        overrides = [parse_override(text) for text in settings]
        changed = override(manifests_or_end(files, namespace), overrides)
    except WrongOverride as error:
        fail(str(error), WRONG_INPUT)
    return [placed_in(found, namespace) for found in changed]


def _check_options(*, dry_run: bool, wait: bool, follow: bool, as_json: bool, timeout_s: float | None) -> None:
    if sum((dry_run, wait, follow)) > 1:
        raise click.UsageError("--dry-run, --wait and --follow exclude each other")
    if follow and as_json:
        raise click.UsageError("--follow prints a log, which is no JSON; use --wait --json")
    if timeout_s is not None and not wait:
        raise click.UsageError("--timeout belongs to --wait")


def _apply(client: ClusterClient, objects: list[dict[str, Any]], *, dry_run: bool, as_json: bool) -> int:
    """Apply each object on its own and print a line for each; the exit code."""
    from stoker.cli.fixed_fields import with_changes
    from stoker.operator.cluster.interface import ClusterError, Invalid

    code = 0
    for body in objects:
        about = {"kind": kind_of(body["kind"]).name, "name": body["metadata"]["name"]}
        try:
            result, _ = client.apply(body, dry_run=dry_run)
            error = ""
        except ClusterError as refused:
            result, error = "refused" if isinstance(refused, Invalid) else "failed", client.explain(refused)
            if isinstance(refused, Invalid):
                error = with_changes(error, _stored(client, body), body)
            code = max(code, WRONG_INPUT if isinstance(refused, Invalid) else FAILED)
        text = f"{about['kind'].lower()}/{about['name']} {result}{f': {error}' if error else ''}"
        if dry_run and not error:
            text += " (dry run)"
        line = json.dumps({**about, "result": result, **({"error": error} if error else {})})
        click.echo(line if as_json else text, err=bool(error) and not as_json)
    return code


def _stored(client: ClusterClient, body: dict[str, Any]) -> dict[str, Any] | None:
    """The object that a refused manifest would have changed; None where there is none, or it cannot be read."""
    from stoker.operator.cluster.interface import ClusterError

    metadata = body["metadata"]
    try:
        return client.read(body["kind"], metadata["namespace"], metadata["name"])
    except ClusterError:
        return None


def _wait(client: ClusterClient, objects: list[dict[str, Any]], *, timeout_s: float | None, as_json: bool) -> int:
    from stoker.cli.follow_scope import EventScope, Name
    from stoker.cli.interruption import Interruption
    from stoker.cli.outage import Outage
    from stoker.cli.printers import FOLLOWED, utc_now
    from stoker.cli.progress import Follower, screen_for

    wanted = [
        Name(o["kind"], o["metadata"]["namespace"], o["metadata"]["name"]) for o in objects if o["kind"] in FOLLOWED
    ]
    since = f"{utc_now():%Y-%m-%dT%H:%M:%SZ}"
    try:
        with Interruption() as interruption, closing(screen_for(as_json=as_json)) as screen:
            scope, ask = EventScope(client.read), Outage(screen.say, client.explain).ask
            follower = Follower(client, screen, wanted, since=since, scope=scope, ask=ask, sleep=interruption.sleep)
            outcome = follower.until_settled(timeout_s)
            if outcome is None:
                screen.say(f"not settled after {timeout_s:g} s")
            return 0 if outcome else FAILED
    except KeyboardInterrupt:
        click.echo("\nStill running on the cluster", err=True)
        return INTERRUPTED


def _follow_log(client: ClusterClient, objects: list[dict[str, Any]]) -> int:
    """Print the log of the one job until it ends; the exit code is its outcome."""
    from stoker.cli.log_selection import LogSelection
    from stoker.cli.logs import print_logs
    from stoker.cli.outage import Outage
    from stoker.cli.printers import state_of

    jobs = [body for body in objects if body["kind"] == "TrainingJob"]
    if len(jobs) != 1:
        raise click.UsageError(f"--follow needs one TrainingJob in the manifests, not {len(jobs)}; use --wait")
    metadata = jobs[0]["metadata"]
    found = client.get("TrainingJob", metadata["name"], metadata["namespace"])
    try:
        print_logs(client, found, LogSelection(follow=True))
    except KeyboardInterrupt:
        click.echo("\nStill running on the cluster", err=True)
        return INTERRUPTED
    outage = Outage(note, client.explain)
    ended = outage.insist(lambda: client.get("TrainingJob", metadata["name"], metadata["namespace"]))
    click.echo(f"trainingjob/{metadata['name']}  {(ended.get('status') or {}).get('phase')}", err=True)
    return 0 if state_of(ended) == "good" else FAILED
