"""Verbs of `stoker local` about objects: get, describe, delete, scale. They print as those of a cluster do."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stoker.cli.deletion import DeletionRequest, deletion_options, run_deletion, targets_of
from stoker.cli.exit_status import FAILED
from stoker.cli.listing_options import ListingRequest, listing_options
from stoker.cli.local_objects import read_objects
from stoker.cli.local_options import ask, namespace_option, open_client, state_option
from stoker.cli.local_source import LocalSource
from stoker.cli.object_names import TARGETS
from stoker.cli.output_format import Format, output_options
from stoker.cli.run_history import PathError
from stoker.cli.supervisor_client import SupervisorClient
from stoker.cli.targets import fail, parse_targets

OVERVIEW = "trainingjobs,checkpoints,inferencedeployments,pods"
"""Kinds that `get` lists when none is named."""


@click.command(
    epilog="\b\nExamples:\n  stoker local get\n  stoker local get tj -w\n  stoker local get tj/teach -o yaml"
)
@click.argument("targets", nargs=-1, metavar="[KIND[,KIND] [NAME...] | KIND/NAME...]", type=TARGETS)
@listing_options
@namespace_option
@state_option
def get(targets: tuple[str, ...], request: ListingRequest, namespace: str, state: Path | None) -> None:
    """List objects.

    KIND is one of tj, ckpt, infd, epool, pods, services, configmaps, secrets, pvc, events. Without it: jobs,
    checkpoints, deployments and pods.
    """
    from stoker.cli.listing import run_listing

    client = open_client(state)
    source = LocalSource(client, None if request.all_namespaces else namespace, endpoints=request.form.is_table)
    code = run_listing(source, parse_targets(targets or (OVERVIEW,)), request)
    if not request.watch:
        _warn(client)
    sys.exit(code)


@click.command(epilog="\b\nExample:\n  stoker local describe tj teach")
@click.argument("targets", nargs=-1, required=True, metavar="KIND [NAME...] | KIND/NAME...", type=TARGETS)
@output_options(Format.TABLE, Format.JSON, Format.YAML)
@namespace_option
@state_option
def describe(targets: tuple[str, ...], output: str, namespace: str, state: Path | None) -> None:
    """Show objects with their events.

    The page holds labels, conditions, status, spec and events. Without a name: all of the kind.
    """
    from stoker.cli.description import print_descriptions

    print_descriptions(LocalSource(open_client(state), namespace), parse_targets(targets), Format(output))


@click.command(epilog="\b\nExamples:\n  stoker local delete tj teach\n  stoker local delete -f examples/quickstart/")
@deletion_options
@namespace_option
@state_option
def delete(request: DeletionRequest, namespace: str, state: Path | None) -> None:
    """Delete objects.

    The data of a checkpoint stays unless its deletionPolicy is Delete. Objects that are named are deleted at once;
    with --selector or --all the command lists them and asks.
    """
    chosen = request.named_targets() or targets_of(read_objects(request.files, (), namespace))
    sys.exit(run_deletion(LocalSource(open_client(state), namespace), chosen, request))


@click.command(epilog="\b\nExample:\n  stoker local scale epool/chat-main 3")
@click.argument("target", metavar="KIND/NAME", type=TARGETS)
@click.argument("replicas", type=click.IntRange(min=0))
@namespace_option
@state_option
def scale(target: str, replicas: int, namespace: str, state: Path | None) -> None:
    """Write /scale of a pool, as `kubectl scale` and HPAs do on a cluster.

    For pools with autoscaling.mode external, within min and max, and for the decode pool of a fixed pair. In every
    other pool the operator takes the number back.
    """
    (found,) = parse_targets([target])
    if not found.kind.scale or found.name is None:
        raise click.UsageError(f"{target!r} has no /scale: give epool/NAME (stoker local get epool)")
    client = open_client(state)
    try:
        ask(lambda: client.scale(found.kind, namespace, found.name or "", replicas))
    except PathError as error:
        fail(str(error), FAILED)
    click.echo(f"enginepool/{found.name} scaled to {replicas}")


def _warn(client: SupervisorClient) -> None:
    """Print what is wrong with the state folder."""
    for problem in client.problems:
        click.echo(f"warning: {problem}", err=True)
