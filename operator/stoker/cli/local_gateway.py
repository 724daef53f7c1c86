"""`stoker local gateway`: the REST API of the embedded cluster, on this machine.

Writes the gateway's key and configuration into the state folder, then becomes the gateway.
"""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path

import click

from stoker.cli.exit_status import FAILED
from stoker.cli.programs import become
from stoker.cli.supervisor_client import SupervisorClient, SupervisorError
from stoker.operator.cluster.local.folders import StateFolders, default_state_folder
from stoker.operator.cluster.local.whole_file import write_whole


@click.command(
    epilog="\b\nExample:\n  stoker local gateway --port 8090 &\n"
    '  curl -H "Authorization: Bearer $(cat ~/.local/state/stoker/gateway.key)" http://127.0.0.1:8090/v1/training/jobs'
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="Port; 0: any free one.")
@click.option("-n", "--namespace", default="default", show_default=True, help="Namespace of requests that name none.")
@click.option("--prometheus", "prometheus_url", help="URL of a Prometheus with DCGM's metrics.")
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    help="Folder with the cluster's state [default: $STOKER_STATE or ~/.local/state/stoker].",
)
def gateway(host: str, port: int, namespace: str, prometheus_url: str | None, state: Path | None) -> None:
    """Serve the REST API of the embedded cluster.

    Callers send the key of STATE/gateway.key (mode 0600, made once) as bearer token. Ends with Ctrl-C.
    """
    client = SupervisorClient(state or default_state_folder())
    try:
        client.status()
    except SupervisorError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(FAILED)
    config = write_gateway_files(client.folders, host, port, namespace, prometheus_url)
    click.echo(f"key: {config.parent / 'gateway.key'}", err=True)
    become("stoker.gateway", ["--config", str(config)])


def write_gateway_files(
    folders: StateFolders, host: str, port: int, namespace: str, prometheus_url: str | None
) -> Path:
    """Write the configuration, and the key if there is none; both with mode 0600. Returns the configuration's path."""
    key, config = folders.root / "gateway.key", folders.root / "gateway.json"
    if not key.exists():
        write_whole(key, secrets.token_urlsafe(32).encode())
    content = {
        "listen": {"host": host, "port": port},
        "cluster": {"kind": "embedded", "socket": str(folders.socket), "key_file": str(key)},
        "namespace": namespace,
        "prometheus_url": prometheus_url,
    }
    write_whole(config, json.dumps(content, indent=1).encode())
    return config
