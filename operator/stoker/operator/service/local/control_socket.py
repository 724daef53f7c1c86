"""The Unix socket of the supervisor's API: bound with mode 0600, and bound again when its file is deleted.

Owned by the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from stoker.operator.cluster.local.socket_path import short_path

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Time between two checks of the socket's file."""


class ControlSocket:
    """Serves an app on the socket at `path`."""

    def __init__(self, path: Path, app: Starlette) -> None:
        self.path = path
        self.app = app

    async def serve(self) -> None:
        """Serve until cancelled; answers under way are finished first.

        Raises:
            OSError: the socket cannot be bound for the first time.
        """
        await self._serve_until_deleted()
        while True:
            log.warning("%s was deleted and is made again", self.path)
            try:
                await self._serve_until_deleted()
            except OSError as error:
                log.error("%s: %s", self.path, error.strerror or error)
                await asyncio.sleep(LOOK_S)

    async def _serve_until_deleted(self) -> None:
        with self._bound() as listener:
            server = _SocketServer(self._config())
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await self._until_deleted(serving)
            finally:
                server.should_exit = True
                await asyncio.gather(serving, return_exceptions=True)

    async def _until_deleted(self, serving: asyncio.Task[None]) -> None:
        bound = self.path.stat()
        while _is_same(self.path, bound):
            done, _ = await asyncio.wait([serving], timeout=LOOK_S)
            if done:
                serving.result()
                raise RuntimeError("the API's server ended by itself")

    @contextlib.contextmanager
    def _bound(self) -> Iterator[socket.socket]:
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            with short_path(self.path) as path:
                listener.bind(path)
        finally:
            os.umask(mask)
        bound = self.path.stat()
        try:
            yield listener
        finally:
            listener.close()
            if _is_same(self.path, bound):
                self.path.unlink(missing_ok=True)

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self.app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
        )


class _SocketServer(uvicorn.Server):
    """A server that leaves signals to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _is_same(path: Path, bound: os.stat_result) -> bool:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (found.st_dev, found.st_ino) == (bound.st_dev, bound.st_ino)
