"""The options and the client that the verbs of a cluster share. Imports nothing of the cluster before it is needed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from stoker.cli.exit_status import FAILED, WRONG_INPUT
from stoker.cli.targets import fail

if TYPE_CHECKING:
    from stoker.cli.cluster_client import ClusterClient

F = TypeVar("F", bound=Callable[..., Any])

NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A label of DNS (RFC 1123)."""


def checked_namespace(_context: click.Context, _option: click.Parameter, name: str | None) -> str | None:
    """Return the namespace, or end the command where no namespace can have this name."""
    if name is None or NAMESPACE.fullmatch(name):
        return name
    raise click.BadParameter(f"{name!r} is no namespace: lower-case letters, digits and '-' inside, 63 at most")


def cluster_options(command: F) -> F:
    """Add --namespace, --context and --kubeconfig."""
    options = (
        click.option(
            "-n",
            "--namespace",
            callback=checked_namespace,
            help="Namespace of the objects [default: that of the context].",
        ),
        click.option("--context", help="Context of the kubeconfig [default: the current one]."),
        click.option("--kubeconfig", help="Kubeconfig file [default: $KUBECONFIG or ~/.kube/config]."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def note(text: str) -> None:
    """Say something beside the output."""
    click.echo(text, err=True)


@contextlib.contextmanager
def opened(
    namespace: str | None, context: str | None, kubeconfig: str | None, *, all_namespaces: bool = False
) -> Iterator[ClusterClient]:
    """A client of the chosen cluster. What the cluster refuses ends the command with its message."""
    try:
        from stoker.cli.cluster_client import ClusterClient, find_access
        from stoker.operator.cluster.kube.credentials import NoCredentials
    except ModuleNotFoundError as error:
        fail(f"this installation has no {error.name}: install stoker[operator]", WRONG_INPUT)
    from stoker.operator.cluster.interface import ClusterError, Invalid

    client: ClusterClient | None = None
    try:
        client = ClusterClient(find_access(kubeconfig, context), namespace, all_namespaces=all_namespaces)
        yield client
    except NoCredentials as error:
        fail(str(error).removeprefix("api.kubeconfig: "), WRONG_INPUT)
    except ClusterError as error:
        message = client.explain(error) if client is not None else str(error)
        fail(message, WRONG_INPUT if isinstance(error, Invalid) else FAILED)
    finally:
        if client is not None:
            client.close()
