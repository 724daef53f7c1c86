"""Address and credentials of the API server: a kubeconfig or the pod's service account, through `kubernetes.aio`.

Tokens are read again when the client library finds them expired; after a refused request the connection loads
everything again.

Called by `service/program`, `connection` and Kopf's shell. Reads files and changes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from kubernetes.aio import config
from kubernetes.aio.client import Configuration

_loader: Any = config
"""Untyped."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class NoCredentials(ValueError):
    """The API server cannot be found; the message names the file that is wrong."""


@dataclass(frozen=True)
class Access:
    """The choice of credentials to load."""

    kubeconfig: str | None = None
    """A kubeconfig file; None uses the service account of this pod."""
    context: str | None = None


async def load_configuration(access: Access) -> Any:
    """Load a `kubernetes.aio` Configuration.

    Raises:
        NoCredentials.
    """
    configuration = Configuration()
    try:
        if access.kubeconfig is None:
            _loader.load_incluster_config(client_configuration=configuration)
        else:
            await _loader.load_kube_config(
                config_file=access.kubeconfig, context=access.context, client_configuration=configuration
            )
    except (config.ConfigException, OSError, ValueError) as error:
        source = access.kubeconfig or f"the service account in {SERVICE_ACCOUNT}"
        raise NoCredentials(f"api.kubeconfig: {source}: {error}") from error
    _read_environment_once(configuration)
    return configuration


def _read_environment_once(configuration: Any) -> None:
    """Take the proxy from the environment now, instead of in two threads for each request.

    Those threads would also read ~/.netrc, whose passwords are not for an API server.
    """
    configuration.client_session_kwargs = {"trust_env": False}
    server = urlsplit(configuration.host)
    if configuration.proxy is None and server.hostname and not proxy_bypass(server.netloc):
        configuration.proxy = getproxies().get(server.scheme)


def context_namespace(access: Access) -> str | None:
    """The namespace of the kubeconfig's context; None where it names none, or there is no kubeconfig.

    Raises:
        NoCredentials.
    """
    if access.kubeconfig is None:
        return None
    try:
        contexts, current = _loader.list_kube_config_contexts(config_file=access.kubeconfig)
    except (config.ConfigException, OSError, ValueError) as error:
        raise NoCredentials(f"{access.kubeconfig}: {error}") from error
    chosen = next((one for one in contexts if one["name"] == access.context), None) if access.context else current
    namespace = (chosen or {}).get("context", {}).get("namespace")
    return str(namespace) if namespace else None


def own_namespace(access: Access) -> str | None:
    """The namespace of this pod's service account; None where there is none."""
    file = SERVICE_ACCOUNT / "namespace"
    if access.kubeconfig is not None or not file.exists():
        return None
    return file.read_text(encoding="ascii").strip() or None
