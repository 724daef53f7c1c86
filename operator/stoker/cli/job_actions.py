"""Verbs that act on a job of a cluster: save, suspend, resume."""

from __future__ import annotations

import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.context import cluster_options, note, opened
from stoker.cli.exit_status import FAILED, INTERRUPTED
from stoker.cli.object_names import JOBS, TargetWord
from stoker.cli.object_source import named
from stoker.cli.seconds import SECONDS
from stoker.cli.targets import Target, fail, job_name
from stoker.operator.cluster.kinds import KINDS

if TYPE_CHECKING:
    from stoker.cli.cluster_client import ClusterClient

LOOK_S = 1.0
LONGEST_START = 30
"""Characters of a job's name that the name of its successor begins with; the name of a job has at most 40."""


@click.command(epilog="\b\nExample:\n  stoker save teach --wait")
@click.argument("job", callback=job_name, type=JOBS)
@click.option("--pin", is_flag=True, help="Keep it whatever the job's retention allows.")
@click.option("--wait", is_flag=True, help="End when it is verified; exit code 1 if it fails.")
@click.option("--timeout", "timeout_s", type=SECONDS, help="Longest time of --wait, in seconds.")
@cluster_options
def save(
    job: str,
    pin: bool,
    wait: bool,
    timeout_s: float | None,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """Ask a running job to save now."""
    if timeout_s is not None and not wait:
        raise click.UsageError("--timeout belongs to --wait")
    with opened(namespace, context, kubeconfig) as client:
        found = named(client, Target(KINDS["TrainingJob"], job))
        if _ended(found):
            fail(f"job {job} is {_phase(found)}: it cannot save any more", FAILED)
        metadata = found["metadata"]
        source = {"jobRef": {"name": metadata["name"], "uid": metadata["uid"]}}
        name = f"{metadata['name']}-save-{secrets.token_hex(3)}"
        made = client.create(_object("Checkpoint", name, metadata["namespace"], {"source": source, "pinned": pin}))
        click.echo(f"checkpoint/{name} {'created' if not wait else 'is being saved'}")
        code = _wait_for(client, made, timeout_s) if wait else 0
    sys.exit(code)


@click.command(epilog="\b\nExample:\n  stoker suspend teach")
@click.argument("job", callback=job_name, type=JOBS)
@cluster_options
def suspend(job: str, namespace: str | None, context: str | None, kubeconfig: str | None) -> None:
    """Suspend a job: it saves, and gives its nodes back until it is resumed."""
    with opened(namespace, context, kubeconfig) as client:
        found = named(client, Target(KINDS["TrainingJob"], job))
        if _ended(found):
            fail(f"job {job} is {_phase(found)}: only a job that goes on can be suspended", FAILED)
        _check_not_cancelled(found)
        client.patch(found, {"spec": {"run": {"suspend": True}}})
    click.echo(f"trainingjob/{job} is being suspended")


@click.command(epilog="\b\nExamples:\n  stoker resume teach\n  stoker resume teach --from teach-400 --total-steps 2000")
@click.argument("job", callback=job_name, type=JOBS)
@click.option(
    "--from",
    "checkpoint",
    type=TargetWord("ckpt"),
    help="Checkpoint of a finished job [default: the newest verified one].",
)
@click.option("--total-steps", type=click.IntRange(min=1), help="Length of the new job.")
@cluster_options
def resume(
    job: str,
    checkpoint: str | None,
    total_steps: int | None,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """Resume a job: a suspended one goes on, of a finished one a new job begins at a checkpoint."""
    with opened(namespace, context, kubeconfig) as client:
        found = named(client, Target(KINDS["TrainingJob"], job))
        _check_not_cancelled(found)
        if _ended(found):
            name = _begin_anew(client, found, checkpoint, total_steps)
            click.echo(f"trainingjob/{name} created")
        elif not (found["spec"].get("run") or {}).get("suspend"):
            fail(f"job {job} is {_phase(found)}: only a suspended or finished job can be resumed", FAILED)
        elif checkpoint is not None or total_steps is not None:
            raise click.UsageError("a suspended job goes on from its newest verified checkpoint, with its own length")
        else:
            client.patch(found, {"spec": {"run": {"suspend": False}}})
            click.echo(f"trainingjob/{job} goes on")


def _check_not_cancelled(job: dict[str, Any]) -> None:
    """End the command for a job that is being cancelled."""
    if not _ended(job) and (job["spec"].get("run") or {}).get("cancel"):
        fail(f"job {job['metadata']['name']} is being cancelled, and that is for good", FAILED)


def _begin_anew(client: ClusterClient, job: dict[str, Any], wanted: str | None, total_steps: int | None) -> str:
    """Create the job that goes on from a checkpoint; its name."""
    from stoker.gateway.domain.resumption import continued_spec, newest_verified, of_job, usable, usable_names
    from stoker.gateway.problem import Problem

    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    own = of_job(client.objects("Checkpoint", namespace=namespace), job)
    chosen = next((one for one in own if one["metadata"]["name"] == wanted), None) if wanted else newest_verified(own)
    if chosen is None:
        missing = f"checkpoint {wanted}; {usable_names(own)}" if wanted else "verified checkpoint"
        fail(f"job {name} has no {missing}", FAILED)
    if not usable(chosen):
        fail(f"checkpoint {wanted} is not verified, so no job can begin at it; {usable_names(own)}", FAILED)
    try:
        spec = continued_spec(job, chosen, total_steps)
    except Problem as problem:
        raise click.UsageError(str(problem).replace("total_steps", "--total-steps")) from problem
    new = f"{name[:LONGEST_START].rstrip('-')}-go-{secrets.token_hex(3)}"
    client.create(_object("TrainingJob", new, namespace, spec))
    return new


def _wait_for(client: ClusterClient, made: dict[str, Any], timeout_s: float | None) -> int:
    """Wait until a checkpoint is verified or has failed; the exit code."""
    from stoker.cli.outage import Outage
    from stoker.cli.printers import progress_line, state_of

    metadata = made["metadata"]
    end = None if timeout_s is None else time.monotonic() + timeout_s
    outage = Outage(note, client.explain)
    found = made
    try:
        while True:
            found = outage.ask(lambda: client.get("Checkpoint", metadata["name"], metadata["namespace"])) or found
            if state_of(found):
                click.echo(f"checkpoint/{metadata['name']}  {_phase(found)}  {progress_line(found)}".rstrip())
                return 0 if state_of(found) == "good" else FAILED
            if end is not None and time.monotonic() >= end:
                click.echo(f"checkpoint/{metadata['name']} is still {_phase(found)} after {timeout_s:g} s", err=True)
                return FAILED
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        click.echo("\nThe job goes on saving", err=True)
        return INTERRUPTED


def _object(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def _phase(found: dict[str, Any]) -> str:
    return str((found.get("status") or {}).get("phase") or "Pending")


def _ended(job: dict[str, Any]) -> bool:
    return _phase(job) in ("Completed", "Failed", "Cancelled")
