"""Verbs that read a Kubernetes cluster: get and describe. They print as `stoker local` does."""

from __future__ import annotations

import sys

import click

from stoker.cli.context import cluster_options, note, opened
from stoker.cli.listing_options import ListingRequest, listing_options
from stoker.cli.object_names import TARGETS
from stoker.cli.output_format import Format, output_options
from stoker.cli.targets import parse_targets

OVERVIEW = "trainingjobs,checkpoints,inferencedeployments"
"""Kinds that `get` lists when none is named."""


@click.command(
    epilog="\b\nExamples:\n  stoker get\n  stoker get tj -A -o wide\n  stoker get tj,ckpt -l team=a -w\n"
    "  stoker get tj/teach -o yaml"
)
@click.argument("targets", nargs=-1, metavar="[KIND[,KIND] [NAME...] | KIND/NAME...]", type=TARGETS)
@listing_options
@cluster_options
def get(
    targets: tuple[str, ...],
    request: ListingRequest,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """List objects of a cluster.

    KIND is one of tj, ckpt, infd, epool, pods, services, pvc, events, nodes. Without it: jobs, checkpoints and
    deployments.
    """
    from stoker.cli.listing import run_listing
    from stoker.cli.outage import Outage

    wanted = parse_targets(targets or (OVERVIEW,))
    with opened(namespace, context, kubeconfig, all_namespaces=request.all_namespaces) as client:
        code = run_listing(client, wanted, request, Outage(note, client.explain).ask)
    sys.exit(code)


@click.command(epilog="\b\nExamples:\n  stoker describe tj teach\n  stoker describe tj/teach ckpt/teach-400")
@click.argument("targets", nargs=-1, required=True, metavar="KIND [NAME...] | KIND/NAME...", type=TARGETS)
@output_options(Format.TABLE, Format.JSON, Format.YAML)
@cluster_options
def describe(
    targets: tuple[str, ...], output: str, namespace: str | None, context: str | None, kubeconfig: str | None
) -> None:
    """Show objects of a cluster with their events.

    Without a name: all of the kind.
    """
    from stoker.cli.description import print_descriptions

    with opened(namespace, context, kubeconfig) as client:
        print_descriptions(client, parse_targets(targets), Format(output))
