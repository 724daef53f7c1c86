"""Addresses of deployments of the embedded cluster as this machine reaches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.cli.local_options import ask
from stoker.cli.supervisor_client import SupervisorClient


def print_endpoints(client: SupervisorClient, say: Callable[[str], None]) -> None:
    """Print the local address of each deployment's endpoint."""
    for deployment in reached_from_here(client, ask(lambda: client.objects("InferenceDeployment"))):
        url = deployment["status"].get("endpoint")
        if url:
            say(f"endpoint of {deployment['metadata']['name']}: {url}")


def reached_from_here(client: SupervisorClient, deployments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replace each deployment's endpoint by the address that this machine reaches."""
    endpoints: dict[str, str] = ask(client.status)["endpoints"]
    shown = []
    for deployment in deployments:
        status = deployment.get("status") or {}
        url = local_endpoint(str(status.get("endpoint") or ""), deployment["metadata"]["namespace"], endpoints)
        shown.append({**deployment, "status": {**status, **({"endpoint": url} if url else {})}})
    return shown


def local_endpoint(inside: str, namespace: str, endpoints: dict[str, str]) -> str:
    """Translate `http://name.namespace.svc:8000/v1` to its local address; empty when there is no such Service."""
    from urllib.parse import urlsplit

    parts = urlsplit(inside)
    service, _, rest = (parts.hostname or "").partition(".")
    place = f"{rest.partition('.')[0] or namespace}/{service}:{parts.port or 80}"
    return f"{endpoints[place]}{parts.path}" if place in endpoints else ""
