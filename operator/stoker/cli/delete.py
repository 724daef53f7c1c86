"""`stoker delete`: objects of a cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stoker.cli.context import cluster_options, opened
from stoker.cli.deletion import check_targets, deletion_options, run_deletion, targets_of
from stoker.cli.exit_status import INTERRUPTED
from stoker.cli.targets import parse_targets


@click.command(
    epilog="\b\nExamples:\n  stoker delete tj teach\n  stoker delete tj/teach ckpt/teach-400\n"
    "  stoker delete -f train.yaml\n  stoker delete tj -l team=a --dry-run"
)
@deletion_options
@cluster_options
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
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
) -> None:
    """Delete objects of a cluster.

    The data of a checkpoint stays unless its deletionPolicy is Delete. Objects that are named are deleted at once;
    with --selector or --all the command lists them and asks.
    """
    from stoker.cli.manifests import manifests_or_end

    wanted = parse_targets(targets)
    check_targets(wanted, files, selector=selector, everything=everything)
    with opened(namespace, context, kubeconfig) as client:
        chosen = wanted or targets_of(manifests_or_end(files, client.own_namespace))
        try:
            code = run_deletion(
                client,
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
