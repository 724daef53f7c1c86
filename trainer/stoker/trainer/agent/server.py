"""The agent's HTTP server: probes, status, metrics and signed control calls on the pod's address.

A Unix socket, if configured, serves the same without signatures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from stoker.pod.config_file import ConfigError
from stoker.pod.listen import ListenConfig


class AgentServer:
    """Serves until `close`.

    `port` is known after `start` (it matters where the configuration leaves it to the kernel).
    """

    def __init__(self, listen: ListenConfig, public: Sequence[BaseRoute], private: Sequence[BaseRoute]) -> None:
        self._listen = listen
        self._public, self._private = public, private
        self._running: list[tuple[_Server, asyncio.Task[None]]] = []
        self.port = listen.port

    async def start(self) -> None:
        """Bind the addresses and serve until `close`.

        Raises:
            ConfigError: an address cannot be bound.
        """
        listener = _tcp_socket(self._listen)
        self.port = listener.getsockname()[1]
        self._serve(listener, self._public)
        if self._listen.control_socket is not None:
            self._serve(_unix_socket(Path(self._listen.control_socket)), self._private)
        while not all(server.started for server, _ in self._running):  # noqa: ASYNC110  (uvicorn has no event for it)
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        for server, _ in self._running:
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self._running))
        _remove(self._listen.control_socket)

    def _serve(self, listener: socket.socket, routes: Sequence[BaseRoute]) -> None:
        config = uvicorn.Config(
            Starlette(routes=list(routes)),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        server = _Server(config)
        self._running.append((server, asyncio.create_task(server.serve(sockets=[listener]))))


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: on SIGTERM the agent saves, and answers until its end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _remove(path: str | None) -> None:
    if path is not None:
        Path(path).unlink(missing_ok=True)


def _tcp_socket(listen: ListenConfig) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((listen.host, listen.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"listen: {listen.host}:{listen.port} cannot be bound: {error.strerror or error}") from error
    return listener


def _unix_socket(path: Path) -> socket.socket:
    """A socket that only this user can open; the mode is set before the first connection is possible."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ConfigError(f"listen.control_socket: {path} cannot be bound: {error.strerror or error}") from error
    finally:
        os.umask(old)
    return listener
