"""The agent's HTTP server: probes, status, metrics and signed control calls on the pod's address.

A Unix socket, if configured, serves the same without signatures.

Owned by the agent.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.routing import BaseRoute

from stoker.pod.config_file import ConfigError
from stoker.pod.listen import ListenConfig
from stoker.pod.serve import Server, bind_tcp, bind_unix

STOP_S = 1.0


class AgentServer:
    """Serves until `close`.

    `port` is known after `start` (it matters where the configuration leaves it to the kernel).
    """

    def __init__(self, listen: ListenConfig, public: Sequence[BaseRoute], private: Sequence[BaseRoute]) -> None:
        self._listen = listen
        self._public, self._private = public, private
        self._servers: list[Server] = []
        self.port = listen.port

    async def start(self) -> None:
        """Bind the addresses and serve until `close`.

        Raises:
            ConfigError: an address cannot be bound.
        """
        listener = _tcp_socket(self._listen)
        self.port = listener.getsockname()[1]
        self._add(listener, self._public)
        if self._listen.control_socket is not None:
            self._add(_unix_socket(Path(self._listen.control_socket)), self._private)
        await asyncio.gather(*(server.start() for server in self._servers))

    async def close(self) -> None:
        await asyncio.gather(*(server.stop(STOP_S) for server in self._servers))
        _remove(self._listen.control_socket)

    def _add(self, listener: socket.socket, routes: Sequence[BaseRoute]) -> None:
        self._servers.append(Server(Starlette(routes=list(routes)), listener, self._listen.limits))


def _remove(path: str | None) -> None:
    if path is not None:
        Path(path).unlink(missing_ok=True)


def _tcp_socket(listen: ListenConfig) -> socket.socket:
    try:
        return bind_tcp(listen.host, listen.port)
    except OSError as error:
        raise ConfigError(f"listen: {listen.host}:{listen.port} cannot be bound: {_reason(error)}") from error


def _unix_socket(path: Path) -> socket.socket:
    try:
        return bind_unix(path)
    except OSError as error:
        raise ConfigError(f"listen.control_socket: {path} cannot be bound: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    """The system's message, without the address that `bind_tcp` puts before it."""
    return str(error.__cause__.strerror) if isinstance(error.__cause__, OSError) else str(error.strerror or error)
