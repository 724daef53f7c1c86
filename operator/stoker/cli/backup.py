"""`stoker backup`: manifests that bring the objects of a cluster back on another one."""

from __future__ import annotations

import click

from stoker.cli.context import cluster_options, opened

KINDS = ("TrainingJob", "Checkpoint", "InferenceDeployment")


@click.command(
    epilog="\b\nExamples:\n  stoker backup -A > backup.yaml\n  stoker submit -f backup.yaml --context new-cluster"
)
@click.option("-A", "--all-namespaces", is_flag=True, help="Objects of all namespaces.")
@cluster_options
def backup(all_namespaces: bool, namespace: str | None, context: str | None, kubeconfig: str | None) -> None:
    """Print manifests that bring jobs, checkpoints and deployments back on a cluster with the same volumes.

    Claims, Secrets and data are not among them. What comes back differently is said on standard error.
    """
    from stoker.cli.manifest_yaml import written
    from stoker.gateway.domain.backup import back_up

    with opened(namespace, context, kubeconfig, all_namespaces=all_namespaces) as client:
        jobs, checkpoints, deployments = (client.objects(kind) for kind in KINDS)
    made = back_up(jobs, checkpoints, deployments)
    for note in made.notes:
        click.echo(note, err=True)
    click.echo("---\n".join(map(written, made.manifests)), nl=False)
