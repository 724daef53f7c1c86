"""Verbs of `stoker local` that read and delete objects: get, describe, delete. They print as those of a cluster do."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stoker.cli.deletion import check_targets, deletion_options, run_deletion, targets_of
from stoker.cli.exit_status import INTERRUPTED
from stoker.cli.listing_options import listing_options
from stoker.cli.local_objects import read_objects
from stoker.cli.local_options import namespace_option, open_client, state_option
from stoker.cli.local_source import LocalSource
from stoker.cli.object_names import TARGETS
from stoker.cli.output_format import Format, output_options
from stoker.cli.supervisor_client import SupervisorClient
from stoker.cli.targets import parse_targets

OVERVIEW = "trainingjobs,checkpoints,inferencedeployments,pods"
"""Kinds that `get` lists when none is named."""


@click.command(
    epilog="\b\nExamples:\n  stoker local get\n  stoker local get tj -w\n  stoker local get tj/teach -o yaml"
)
@click.argument("targets", nargs=-1, metavar="[KIND[,KIND] [NAME...] | KIND/NAME...]", type=TARGETS)
@listing_options
@namespace_option
@state_option
def get(
    targets: tuple[str, ...],
    all_namespaces: bool,
    selector: str | None,
    watch: bool,
    no_headers: bool,
    output: str,
    namespace: str,
    state: Path | None,
) -> None:
    """List objects.

    KIND is one of tj, ckpt, infd, epool, pods, services, configmaps, secrets, pvc, events. Without it: jobs,
    checkpoints, deployments and pods.
    """
    from stoker.cli.listing import Watch, listing_of, print_listing
    from stoker.cli.text_style import style_of

    client, form = open_client(state), Format(output)
    source = LocalSource(client, None if all_namespaces else namespace, endpoints=form.is_table)
    wanted = parse_targets(targets or (OVERVIEW,))
    listing = listing_of(source, wanted, selector=selector, all_namespaces=all_namespaces)
    if not watch:
        print_listing(listing, form, style_of(), headers=not no_headers)
        _warn(client)
        return
    try:
        Watch(listing, form, style_of(), headers=not no_headers).for_ever()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


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
def delete(
    targets: tuple[str, ...],
    files: tuple[Path, ...],
    selector: str | None,
    everything: bool,
    yes: bool,
    ignore_not_found: bool,
    dry_run: bool,
    wait: bool,
    timeout_s: float | None,
    namespace: str,
    state: Path | None,
) -> None:
    """Delete objects.

    The data of a checkpoint stays unless its deletionPolicy is Delete. Objects that are named are deleted at once;
    with --selector or --all the command lists them and asks.
    """
    wanted = parse_targets(targets)
    check_targets(wanted, files, selector=selector, everything=everything)
    chosen = wanted or targets_of(read_objects(files, (), namespace))
    try:
        code = run_deletion(
            LocalSource(open_client(state), namespace),
            chosen,
            of_files=bool(files),
            selector=selector,
            yes=yes,
            ignore_not_found=ignore_not_found,
            dry_run=dry_run,
            wait=wait,
            timeout_s=timeout_s,
        )
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def _warn(client: SupervisorClient) -> None:
    """Print what is wrong with the state folder."""
    for problem in client.problems:
        click.echo(f"warning: {problem}", err=True)
