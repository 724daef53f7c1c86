"""The `listen` section of every program's configuration: addresses, limits and the guard of the control routes.

Values only, part of the configurations of trainer, engine and router; `serve` binds the addresses.
"""

from __future__ import annotations

from pydantic import Field

from stoker.pod.config_file import Config
from stoker.pod.http_limits import HttpLimits


class ListenConfig(Config):
    """Addresses and guards of a program's HTTP server."""

    host: str = "127.0.0.1"
    """Address to bind; `0.0.0.0` in pods, a loopback address under the embedded cluster."""
    port: int = Field(default=8080, ge=0, le=65535)
    """TCP port; 0 takes any free one, for programs that no other program connects to."""
    control_keys: str | None = None
    """Folder with the operator's public keys (`*.pem`), read for each call.
    Without it, control routes exist only on `control_socket`."""
    control_socket: str | None = None
    """Unix socket (mode 0600) with the same routes; control routes need no token there."""
    limits: HttpLimits = HttpLimits()
    """Bounds on connections, heads, bodies and slow clients."""
