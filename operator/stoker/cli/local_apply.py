"""`stoker local apply`: create or change objects, start a supervisor if none runs, and follow what happens."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from stoker.cli.exit_status import FAILED, INTERRUPTED, WRONG_INPUT
from stoker.cli.local_console import console_beside
from stoker.cli.local_endpoints import print_endpoints
from stoker.cli.local_objects import read_objects
from stoker.cli.local_options import ask, namespace_option, open_client, state_option
from stoker.cli.manifest_options import claims_option, files_option
from stoker.cli.seconds import SECONDS
from stoker.cli.supervisor_client import NotRunning, SupervisorClient, SupervisorError
from stoker.cli.targets import fail
from stoker.operator.cluster.local.folders import default_state_folder


@click.command(
    "apply", epilog="\b\nExample:\n  stoker local apply -f examples/quickstart/ --claim models=~/.cache/stoker/models"
)
@files_option()
@claims_option("Use DIR as the PersistentVolumeClaim NAME. May be repeated.")
@click.option(
    "--addresses",
    type=click.Choice(["auto", "loopback", "ports"]),
    default="auto",
    help="loopback: an address in 127.0.0.0/8 per pod (Linux); ports: a port of 127.0.0.1 per port. "
    "auto chooses loopback on Linux.",
)
@click.option("--detach", is_flag=True, help="Leave the cluster running when this command ends.")
@click.option(
    "--wait",
    is_flag=True,
    help="End when everything applied has completed or serves; exit code 1 if something failed.",
)
@click.option("--timeout", "timeout_s", type=SECONDS, help="Longest time to wait, in seconds.")
@click.option("--ui", is_flag=True, help="Serve the console beside this command, and open it where there is a screen.")
@click.option(
    "--recreate-lost", is_flag=True, help="Create objects again whose file in the state folder is damaged or missing."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@namespace_option
@state_option
def apply(
    files: tuple[Path, ...],
    claims: tuple[str, ...],
    addresses: str,
    detach: bool,
    wait: bool,
    timeout_s: float | None,
    ui: bool,
    recreate_lost: bool,
    as_json: bool,
    namespace: str,
    state: Path | None,
) -> None:
    """Create or change objects and show their progress.

    Without --detach the cluster ends with this command: Ctrl-C lets jobs save, stops every pod and leaves no process
    behind. The state stays; the next apply continues from it.
    """
    if ui and (as_json or (detach and not wait)):
        raise click.UsageError("--ui serves while this command runs: leave out --json, and --detach without --wait")
    if timeout_s is not None and detach and not wait:
        raise click.UsageError("--timeout belongs to the waiting: leave out --detach, or give --wait as well")
    objects = read_objects(files, claims, namespace)
    client = open_client(state)
    started = _ensure(client, addresses, detach=detach)
    stored = 0
    try:
        _check_addresses(client, addresses)
        code, stored = _apply(client, objects, recreate_lost=recreate_lost, as_json=as_json)
        if detach and not wait and stored:
            _hint(client, as_json=as_json)
        if code or (detach and not wait):
            sys.exit(code)
        with console_beside(client.folders, namespace, wanted=ui):
            sys.exit(_follow(client, objects, wait=wait, stay=not detach, timeout_s=timeout_s, as_json=as_json))
    except KeyboardInterrupt:
        if not started or (detach and stored):
            click.echo("\nStill running; stop everything with: stoker local down", err=True)
        sys.exit(INTERRUPTED)
    finally:
        if started and not (detach and stored):
            _bring_down(client, quiet=as_json)


def _ensure(client: SupervisorClient, addresses: str, *, detach: bool) -> bool:
    """Start a supervisor unless one runs; True when it was started here."""
    if ask(client.running):
        if detach:
            ask(client.detach)
        return False
    chosen = ("loopback" if sys.platform == "linux" else "ports") if addresses == "auto" else addresses
    ask(lambda: client.start(chosen, attached=not detach))
    return True


def _check_addresses(client: SupervisorClient, addresses: str) -> None:
    """End the command where the state folder keeps another kind of addresses than the one asked for."""
    if addresses == "auto":
        return
    kept = ask(client.status)["addresses"]
    if addresses != kept:
        fail(f"--addresses {addresses}: {client.folders.root} keeps {kept}; --state names another folder", WRONG_INPUT)


def _apply(
    client: SupervisorClient, objects: list[dict[str, Any]], *, recreate_lost: bool, as_json: bool
) -> tuple[int, int]:
    """Apply the objects and print a line for each; the exit code, and how many were stored."""
    results = ask(lambda: apply_to(client, objects, recreate_lost=recreate_lost))
    for result in results:
        error = f": {result['error']}" if "error" in result else ""
        text = f"{str(result['kind']).lower()}/{result.get('name')} {result['result']}{error}"
        click.echo(json.dumps(result) if as_json else text, err=bool(error) and not as_json)
    outcomes = [result["result"] for result in results]
    code = WRONG_INPUT if "refused" in outcomes else FAILED if "failed" in outcomes else 0
    return code, sum("error" not in result for result in results)


def apply_to(
    client: SupervisorClient, objects: list[dict[str, Any]], *, recreate_lost: bool = False
) -> list[dict[str, Any]]:
    """Apply the objects; a result for each, whose error names what would change of a fixed section."""
    from stoker.cli.fixed_fields import with_changes

    results = client.apply(objects, recreate_lost=recreate_lost)
    for result, body in zip(results, objects, strict=True):
        if result["result"] == "refused":
            result["error"] = with_changes(result["error"], _stored(client, body), body)
    return results


def _stored(client: SupervisorClient, body: dict[str, Any]) -> dict[str, Any] | None:
    """The object that a refused manifest would have changed; None where there is none."""
    metadata = body["metadata"]
    try:
        (found,) = client.objects(body["kind"], namespace=metadata["namespace"], name=metadata["name"])
    except SupervisorError:
        return None
    return found


def _follow(
    client: SupervisorClient,
    objects: list[dict[str, Any]],
    *,
    wait: bool,
    stay: bool,
    timeout_s: float | None,
    as_json: bool,
) -> int:
    """Show progress until everything has settled, then until Ctrl-C if a deployment serves and the command stays."""
    from stoker.cli.follow_scope import Name
    from stoker.cli.interruption import Interruption
    from stoker.cli.printers import utc_now
    from stoker.cli.progress import Follower, screen_for

    wanted = [Name(o["kind"], o["metadata"]["namespace"], o["metadata"]["name"]) for o in objects]
    followed = [name for name in wanted if name.kind in ("TrainingJob", "Checkpoint", "InferenceDeployment")]
    with Interruption() as interruption, closing(screen_for(as_json=as_json)) as screen:
        since = f"{utc_now():%Y-%m-%dT%H:%M:%SZ}"
        follower = Follower(client, screen, followed, since=since, sleep=interruption.sleep)
        outcome = ask(lambda: follower.until_settled(timeout_s))
        if outcome is None:
            screen.say(f"not settled after {timeout_s:g} s")
        print_endpoints(client, screen.say)
        goes_on = not followed or any(name.kind == "InferenceDeployment" for name in followed)
        if outcome and stay and goes_on and not wait:
            screen.say("Ctrl-C stops everything")
            ask(follower.for_ever)
        return 0 if outcome else FAILED


def _hint(client: SupervisorClient, *, as_json: bool) -> None:
    if not as_json:
        where = "" if client.folders.root == default_state_folder().resolve() else f" --state {client.folders.root}"
        click.echo(f"running in the background; look: stoker local get{where}; stop: stoker local down{where}")


def _bring_down(client: SupervisorClient, *, quiet: bool) -> None:
    """Stop the supervisor that this command started; a second Ctrl-C shortens the grace periods."""
    if not quiet:
        click.echo("stopping ...", err=True)
    for grace_s in (None, 0.0):
        try:
            client.down(grace_s)
        except KeyboardInterrupt:
            continue
        except NotRunning:
            return
        except SupervisorError as error:
            click.echo(f"error: not stopped: {error}", err=True)
            return
        return
