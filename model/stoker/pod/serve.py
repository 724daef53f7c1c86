"""An HTTP server that a program starts and stops inside its own event loop: uvicorn on sockets that are already bound.

The program keeps its signal handlers. A `Server` serves one TCP port or one Unix socket; a program has one or two. A
server without a socket serves connections that another process has accepted.

Called by engine, router, operator and the trainer's agent at their start; each owns its `Server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from stoker.pod.http_limits import HttpLimits
from stoker.pod.http_protocol import BoundedHttpProtocol, RateLimitedWarning

log = logging.getLogger("stoker.http")
DEADLINE_TICKS = 3
"""Ticks of uvicorn's main loop (0.1 s each) between two checks of the connections' deadlines."""


def bind_tcp(host: str, port: int) -> socket.socket:
    """Bind a TCP socket, which does not listen yet. Port 0 takes a free one.

    Raises:
        OSError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if it sees TCP
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from error
    return bound


def bind_unix(path: Path | str) -> socket.socket:
    """Bind a Unix socket that only its owner may use (mode 0600). The socket of an earlier run is replaced."""
    Path(path).unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    finally:
        os.umask(mask)
    return bound


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, and with deadlines for connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % DEADLINE_TICKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, BoundedHttpProtocol):
                    connection.check_deadlines(now)
        return await super().on_tick(counter)


class Server:
    """One ASGI application on one bound socket, or on the connections that it is given."""

    def __init__(self, app: Any, bound: socket.socket | None, limits: HttpLimits = HttpLimits()) -> None:  # noqa: B008
        self.bound = bound
        limits = _within_open_files(limits)
        warn = RateLimitedWarning(log, time.monotonic)
        protocol: Any = functools.partial(BoundedHttpProtocol, limits=limits, warn=warn)
        self._protocol = protocol
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app, http=protocol, log_config=None, access_log=False, lifespan="off", ws="none",
                server_header=False, timeout_keep_alive=limits.keep_alive_s, backlog=2048,
            )
        )  # fmt: skip
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The TCP port, known before the start."""
        assert self.bound is not None, "a server of connections that it is given has no port"
        return int(self.bound.getsockname()[1])

    async def start(self) -> None:
        """Start to serve, and return when connections are accepted."""
        sockets = [self.bound] if self.bound is not None else []
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=sockets), name="http server")
        while not self._uvicorn.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)

    async def adopt(self, connection: socket.socket, number: int, on_lost: Callable[[], None]) -> None:
        """Serve a connection that another process has accepted; the server must be started.

        Args:
            connection: an accepted socket, owned by this server from now on.
            number: open connections of all processes that share the limit, with this one.
            on_lost: called once at the connection's end.
        """
        server = self._uvicorn
        protocol = functools.partial(
            self._protocol, config=server.config, server_state=server.server_state, app_state=server.lifespan.state,
            number=number, on_lost=on_lost,
        )  # fmt: skip
        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)

    async def stop(self, timeout_s: float) -> None:
        """Accept no connection, wait `timeout_s` (whole seconds, at least 1) for running answers, then cut them."""
        if self._task is None:
            if self.bound is not None:
                self.bound.close()
            return
        self._uvicorn.config.timeout_graceful_shutdown = max(int(timeout_s), 1)
        self._uvicorn.should_exit = True
        await asyncio.wait({self._task})
        self._task.result()


def _within_open_files(limits: HttpLimits) -> HttpLimits:
    """The limits with no more connections than half of the files that this process may open."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits.max_connections if open_files == resource.RLIM_INFINITY else max(open_files // 2, 1)
    return limits.model_copy(update={"max_connections": min(limits.max_connections, most)})
