"""Address and credentials of the API server: the pod's service account, or a kubeconfig through `kubernetes.aio`.

Tokens are read again when they may have expired; after a refused request the connection loads
everything again.

Called by `service/program`, `connection` and Kopf's shell. Reads files and changes none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.operator.cluster.kube.service_account import SERVICE_ACCOUNT, ServiceAccount


class NoCredentials(ValueError):
    """The API server cannot be found; the message names the file that is wrong."""


@dataclass(frozen=True)
class Access:
    """The choice of credentials to load."""

    kubeconfig: str | None = None
    """A kubeconfig file; None uses the service account of this pod."""
    context: str | None = None


async def load_configuration(access: Access) -> Any:
    """Load the credentials: a `ServiceAccount`, or a `kubernetes.aio` Configuration from a kubeconfig.

    Raises:
        NoCredentials.
    """
    if access.kubeconfig is None:
        try:
            return ServiceAccount()
        except (OSError, ValueError) as error:
            raise NoCredentials(f"api.kubeconfig: the service account in {SERVICE_ACCOUNT}: {error}") from error
    from kubernetes.aio import client, config  # 12 MB that an operator in a pod does not need

    loader: Any = config  # untyped
    configuration = client.Configuration()
    with _readable(f"api.kubeconfig: {access.kubeconfig}", access.kubeconfig):
        await loader.load_kube_config(
            config_file=access.kubeconfig, context=access.context, client_configuration=configuration
        )
    return configuration


def context_namespace(access: Access) -> str | None:
    """The namespace of the kubeconfig's context; None where it names none, or there is no kubeconfig.

    Raises:
        NoCredentials.
    """
    if access.kubeconfig is None:
        return None
    with _readable(access.kubeconfig, access.kubeconfig):
        contexts, current = _contexts(access.kubeconfig)
        wanted = access.context or current
    there = ", ".join(sorted(contexts)) or "none"
    if not wanted:
        raise NoCredentials(f"{access.kubeconfig}: no current-context: choose one by --context, there are: {there}")
    if wanted not in contexts:
        raise NoCredentials(f"{access.kubeconfig}: no context {wanted!r}, there are: {there}")
    namespace = contexts[wanted].get("namespace")
    return str(namespace) if namespace else None


def _contexts(files: str) -> tuple[dict[str, dict[str, Any]], str | None]:
    """The contexts of kubeconfig files by their names, and the name of the current one, if they name one."""
    from kubernetes.aio.config.kube_config import KubeConfigMerger

    merger: Any = KubeConfigMerger  # untyped
    merged: Any = merger(files).config.value
    return {one.value["name"]: one.value["context"] for one in merged["contexts"]}, merged.get("current-context")


@contextmanager
def _readable(name: str, files: str) -> Iterator[None]:
    """Read a kubeconfig inside; `files` may be several, with the system's separator.

    Raises:
        NoCredentials: none of them exists or can be read, or what they hold is no kubeconfig.
    """
    import yaml
    from kubernetes.aio import config

    try:
        is_there = any(Path(file).expanduser().exists() for file in files.split(os.pathsep))
    except OSError as error:
        raise NoCredentials(f"{name}: {error.strerror}") from error
    if not is_there:
        raise NoCredentials(f"{name}: no such file")
    try:
        yield
    except (config.ConfigException, OSError, ValueError) as error:
        raise NoCredentials(f"{name}: {error}") from error
    except yaml.YAMLError as error:
        raise NoCredentials(f"{name}: no kubeconfig: {' '.join(str(error).split())}") from error
    except (TypeError, AttributeError, KeyError) as error:
        raise NoCredentials(f"{name}: no kubeconfig: it needs clusters, users, contexts and current-context") from error


def own_namespace(access: Access) -> str | None:
    """The namespace of this pod's service account; None where there is none."""
    file = SERVICE_ACCOUNT / "namespace"
    if access.kubeconfig is not None or not file.exists():
        return None
    return file.read_text(encoding="ascii").strip() or None
