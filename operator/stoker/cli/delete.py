"""`stoker delete`: objects of a cluster."""

from __future__ import annotations

import sys

import click

from stoker.cli.context import cluster_options, note, opened
from stoker.cli.deletion import DeletionRequest, deletion_options, run_deletion, targets_of


@click.command(
    epilog="\b\nExamples:\n  stoker delete tj teach\n  stoker delete tj/teach ckpt/teach-400\n"
    "  stoker delete -f train.yaml\n  stoker delete tj -l team=a --dry-run"
)
@deletion_options
@cluster_options
def delete(request: DeletionRequest, namespace: str | None, context: str | None, kubeconfig: str | None) -> None:
    """Delete objects of a cluster.

    The data of a checkpoint stays unless its deletionPolicy is Delete. Objects that are named are deleted at once;
    with --selector or --all the command lists them and asks.
    """
    from stoker.cli.manifests import manifests_or_end
    from stoker.cli.outage import Outage

    wanted = request.named_targets()
    with opened(namespace, context, kubeconfig) as client:
        chosen = wanted or targets_of(manifests_or_end(request.files, client.own_namespace))
        code = run_deletion(client, chosen, request, Outage(note, client.explain).ask)
    sys.exit(code)
