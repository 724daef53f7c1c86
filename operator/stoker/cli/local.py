"""`stoker local`: manifests on this machine. Every verb calls a supervisor; `apply` starts one if none runs.

Owns the verbs and their options; the state belongs to the supervisor, reached through `supervisor_client`.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import click

from stoker.cli.exit_status import FAILED, INTERRUPTED, WRONG_INPUT
from stoker.cli.local_console import console_beside
from stoker.cli.local_gateway import gateway
from stoker.cli.local_plot import plot_local
from stoker.cli.supervisor_client import NOT_FOUND, NotRunning, SupervisorClient, SupervisorError
from stoker.cli.targets import belongs_to, fail, kind_of, named_once, prefixed
from stoker.operator.cluster.kinds import Kind
from stoker.operator.cluster.local.folders import StateFolders, default_state_folder
from stoker.operator.cluster.local.state_lock import StateFolderTaken, lock_state

F = TypeVar("F", bound=Callable[..., Any])

FOLLOW_LOGS_S = 0.3
OVERVIEW = ("trainingjobs", "checkpoints", "inferencedeployments", "pods")
"""Kinds that `get` lists when none is named."""


def state_option(command: F) -> F:
    return click.option(
        "--state",
        type=click.Path(path_type=Path),
        help="Folder with the cluster's state [default: $STOKER_STATE or ~/.local/state/stoker].",
    )(command)


def namespace_option(command: F) -> F:
    return click.option("-n", "--namespace", default="default", show_default=True, help="Namespace of the objects.")(
        command
    )


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nExamples:\n  stoker local apply -f examples/quickstart/ --detach\n  stoker local get tj",
)
def local() -> None:
    """Run manifests on this machine without Kubernetes.

    The embedded cluster runs the same operator; each pod is a group of local processes.
    """


local.add_command(gateway)
local.add_command(plot_local)


@local.command(
    epilog="\b\nExample:\n  stoker local apply -f examples/quickstart/ --claim models=~/.cache/stoker/models"
)
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="Manifest (YAML or JSON), folder of manifests, or - for standard input. May be repeated.",
)
@click.option(
    "--claim",
    "claims",
    multiple=True,
    metavar="NAME=DIR",
    help="Use DIR as the PersistentVolumeClaim NAME. May be repeated.",
)
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
@click.option("--timeout", "timeout_s", type=click.FloatRange(min=0), help="Longest time to wait, in seconds.")
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
    objects = _manifests(files, claims, namespace)
    client = _client(state)
    started = _ensure(client, addresses, detach=detach)
    stored = 0
    try:
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

    client = _client(state)
    word, name = named_once(kind, name) if kind is not None else (None, None)
    kinds = [kind_of(one) for one in (OVERVIEW if word is None else (word,))]
    found: dict[Kind, list[dict[str, Any]]] = {}
    for one in kinds:
        items = _ask(lambda one=one: client.objects(one.name, namespace=namespace, name=name))  # type: ignore[misc]
        found[one] = _reached_from_here(client, items) if one.name == "InferenceDeployment" and not as_json else items
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
    client = _client(state)
    found = _ask(lambda: client.objects(kind_of(word).name, namespace=namespace, name=chosen))[0]
    uid = found["metadata"]["uid"]
    all_events = _ask(lambda: client.objects("Event", namespace=namespace))
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
    client = _client(state)
    pods = _ask(lambda: _pods_of(client, target, namespace))
    offsets = dict.fromkeys(pods, 0)
    prefix = len(pods) > 1
    try:
        while offsets:
            for pod in list(offsets):
                part = _ask(lambda pod=pod: client.logs(namespace, pod, offsets[pod]))  # type: ignore[misc]
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
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Delete the objects of these manifests. May be repeated.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the objects are gone.")
@namespace_option
@state_option
def delete(
    kind: str | None, names: tuple[str, ...], files: tuple[Path, ...], wait: bool, namespace: str, state: Path | None
) -> None:
    """Delete objects.

    KIND NAME..., KIND/NAME or -f FILE. The data of a checkpoint stays unless its deletionPolicy is Delete.
    """
    if kind and "/" in kind and not names:
        kind, _, name = kind.partition("/")
        names = (name,)
    if bool(files) == bool(kind and names):
        raise click.UsageError("give KIND NAME..., or -f FILE")
    client = _client(state)
    targets = [(kind_of(kind).name, namespace, name) for name in names] if kind else _named(files, namespace)
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
    client = _client(state)
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
    facts = _ask(lambda: _client(state).status())
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


def _client(state: Path | None) -> SupervisorClient:
    return SupervisorClient(state or default_state_folder())


def _manifests(files: Sequence[Path], claims: Sequence[str], namespace: str) -> list[dict[str, Any]]:
    from stoker.cli.manifests import ManifestError, claim_manifest, read_manifests

    folders = parse_claims(claims)
    bound = [claim_manifest(name, folder, namespace) for name, folder in folders.items()]
    try:
        objects = read_manifests(files, namespace)
    except ManifestError as error:
        fail(str(error), WRONG_INPUT)
    others = [
        o for o in objects if o.get("kind") != "PersistentVolumeClaim" or o["metadata"].get("name") not in folders
    ]
    return [*bound, *others]


def parse_claims(claims: Sequence[str]) -> dict[str, Path]:
    """Parse `NAME=DIR` options; ends the command when a folder does not exist."""
    found = {}
    for claim in claims:
        name, _, folder = claim.partition("=")
        if not name or not folder:
            raise click.UsageError(f"--claim {claim}: NAME=DIR is needed")
        if not Path(folder).expanduser().is_dir():
            fail(f"--claim {claim}: {folder} is not a folder", WRONG_INPUT)
        if name in found:
            fail(f"--claim {claim}: {name} is given twice", WRONG_INPUT)
        found[name] = Path(folder).expanduser().resolve()
    return found


def _ensure(client: SupervisorClient, addresses: str, *, detach: bool) -> bool:
    """Start a supervisor unless one runs; True when it was started here."""
    if _ask(client.running):
        if detach:
            _ask(client.detach)
        return False
    chosen = ("loopback" if sys.platform == "linux" else "ports") if addresses == "auto" else addresses
    _ask(lambda: client.start(chosen, attached=not detach))
    return True


def _apply(
    client: SupervisorClient, objects: list[dict[str, Any]], *, recreate_lost: bool, as_json: bool
) -> tuple[int, int]:
    """Apply the objects and print a line for each; the exit code, and how many were stored."""
    results = _ask(lambda: client.apply(objects, recreate_lost=recreate_lost))
    for result in results:
        error = f": {result['error']}" if "error" in result else ""
        text = f"{str(result['kind']).lower()}/{result.get('name')} {result['result']}{error}"
        click.echo(json.dumps(result) if as_json else text, err=bool(error) and not as_json)
    outcomes = [result["result"] for result in results]
    code = WRONG_INPUT if "refused" in outcomes else FAILED if "failed" in outcomes else 0
    return code, sum("error" not in result for result in results)


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
    from stoker.cli.interruption import Interruption
    from stoker.cli.printers import utc_now
    from stoker.cli.progress import Follower, Name, screen_for

    wanted = [Name(o["kind"], o["metadata"]["namespace"], o["metadata"]["name"]) for o in objects]
    followed = [name for name in wanted if name.kind in ("TrainingJob", "Checkpoint", "InferenceDeployment")]
    with Interruption() as interruption, closing(screen_for(as_json=as_json)) as screen:
        since = f"{utc_now():%Y-%m-%dT%H:%M:%SZ}"
        follower = Follower(client, screen, followed, since=since, sleep=interruption.sleep)
        outcome = _ask(lambda: follower.until_settled(timeout_s))
        if outcome is None:
            screen.say(f"not settled after {timeout_s:g} s")
        _say_endpoints(client, screen.say)
        goes_on = not followed or any(name.kind == "InferenceDeployment" for name in followed)
        if outcome and stay and goes_on and not wait:
            screen.say("Ctrl-C stops everything")
            _ask(follower.for_ever)
        return 0 if outcome else FAILED


def _say_endpoints(client: SupervisorClient, say: Callable[[str], None]) -> None:
    """Print the local address of each deployment's endpoint."""
    for deployment in _reached_from_here(client, _ask(lambda: client.objects("InferenceDeployment"))):
        url = deployment["status"].get("endpoint")
        if url:
            say(f"endpoint of {deployment['metadata']['name']}: {url}")


def _reached_from_here(client: SupervisorClient, deployments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace each deployment's endpoint by the address that this machine reaches."""
    endpoints: dict[str, str] = _ask(client.status)["endpoints"]
    shown = []
    for deployment in deployments:
        status = deployment.get("status") or {}
        url = local_endpoint(str(status.get("endpoint") or ""), deployment["metadata"]["namespace"], endpoints)
        shown.append({**deployment, "status": {**status, **({"endpoint": url} if url else {})}})
    return shown


def local_endpoint(inside: str, namespace: str, endpoints: dict[str, str]) -> str:
    """Translate `http://name.namespace.svc:8000/v1` to its local address; empty when there is no such Service."""
    from urllib.parse import urlsplit

    parts = urlsplit(inside)
    service, _, rest = (parts.hostname or "").partition(".")
    place = f"{rest.partition('.')[0] or namespace}/{service}:{parts.port or 80}"
    return f"{endpoints[place]}{parts.path}" if place in endpoints else ""


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


def _named(files: Sequence[Path], namespace: str) -> list[tuple[str, str, str]]:
    found = _manifests(files, (), namespace)
    return [(o["kind"], o["metadata"]["namespace"], o["metadata"]["name"]) for o in reversed(found)]


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
        gone = not [o for o in _ask(lambda: client.objects(kind, namespace=namespace)) if o["metadata"]["name"] == name]
    click.echo(f"{kind.lower()}/{name} {'deleted' if gone else 'is being deleted'}")
    return 0


T = TypeVar("T")


def _ask(question: Callable[[], T]) -> T:
    """Call the supervisor; an error ends the command with its message."""
    try:
        return question()
    except NotRunning as error:
        fail(f"{error}; start one with: stoker local apply -f ...", FAILED)
    except SupervisorError as error:
        fail(str(error), FAILED)
