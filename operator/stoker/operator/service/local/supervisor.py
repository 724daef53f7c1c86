"""The one process of a state folder: object store, operator, kubelet and Services, behind a Unix socket for the command line.

It holds a lock on the folder. It ends on SIGTERM, on `POST /v1/down`, and when the terminal that leashed it goes; then every pod
gets its grace period first. When it is killed, its pods are killed too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import uvicorn
from starlette.applications import Starlette

from stoker.operator.cluster.local.addresses import Addresses, Mode
from stoker.operator.cluster.local.folders import StateFolders, short_folders
from stoker.operator.cluster.local.gpus import Gpus, find_devices
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.object_files import ObjectFiles
from stoker.operator.cluster.local.objects import Admit, ObjectStore
from stoker.operator.cluster.local.pod_environment import node_environment
from stoker.operator.cluster.local.pod_life import Node
from stoker.operator.cluster.local.probes import ask_http
from stoker.operator.cluster.local.process import ShimRunner
from stoker.operator.cluster.local.reservations import Reservations
from stoker.operator.cluster.local.socket_path import short_path
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import SystemClock, timestamp
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.operator import Operator, Reconciler
from stoker.operator.service.local.api import make_app
from stoker.operator.service.local.kubelet import Kubelet
from stoker.operator.service.local.services import Services
from stoker.pod.control_key import new_private_key, public_key

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
RESYNC_INTERVAL_S = 60.0


class StateFolderTaken(Exception):
    """Another supervisor has the state folder."""


@dataclass(frozen=True)
class Options:
    """How a supervisor is started."""

    state: Path
    addresses: Mode
    leash: int | None = None
    """File descriptor of a pipe's end: when it closes, the terminal that started us is gone."""


class Supervisor:
    """Call `run` once, in the main thread (children are told of the death of the thread that made them)."""

    def __init__(
        self, options: Options, reconcilers: Mapping[str, Reconciler], admit: Admit, environment: Mapping[str, str]
    ) -> None:
        self.options = options
        self.folders = StateFolders(options.state.resolve())
        self.reconcilers = reconcilers
        self.admit = admit
        self.environment = environment
        self.clock = SystemClock()
        self.started_at = timestamp(self.clock.now())
        self._stop = asyncio.Event()
        self._grace_s: float | None = None
        self._leash = options.leash

    async def run(self) -> None:
        """Until it is told to stop, and every pod has ended.

        Raises:
            StateFolderTaken.
        """
        self.folders.make()
        with _lock(self.folders.lock), short_folders(self.folders.root) as self.folders, Reservations() as names:
            self._listen_to_signals()
            await self._run(Addresses(self.options.addresses, names.take, self.folders.addresses))

    def stop(self, grace_s: float | None = None) -> None:
        """Begin to end; pods get at most `grace_s`, or their own grace period."""
        self._grace_s = grace_s
        self._stop.set()

    def detach(self) -> None:
        """Stay when the terminal goes."""
        if self._leash is not None:
            asyncio.get_running_loop().remove_reader(self._leash)
            os.close(self._leash)
            self._leash = None

    def facts(self) -> dict[str, object]:
        """What `stoker local status` shows."""
        return {
            "pid": os.getpid(),
            "state": str(self.folders.root),
            "addresses": self.options.addresses,
            "startedAt": self.started_at,
            "pods": self.kubelet.running,
            "detached": self._leash is None,
            "stopping": self._stop.is_set(),
        }

    async def _run(self, addresses: Addresses) -> None:
        key = self._private_key()
        settings = Settings(
            control_public_keys={"control.pem": public_key(key).decode()},
            poll_interval_s=POLL_INTERVAL_S,
            resync_interval_s=RESYNC_INTERVAL_S,
        )
        objects = ObjectStore(
            now=self.clock.now,
            new_uid=lambda: str(uuid.uuid4()),
            admit=self.admit,
            keeper=ObjectFiles(self.folders.objects),
        )
        pods = PodHttp(key, self.clock, lambda: secrets.token_hex(16), poll_timeout_s=settings.poll_timeout_s)
        cluster = LocalCluster(objects, addresses, pods, self.clock)
        self.kubelet = Kubelet(self._node(objects, addresses))
        services = Services(objects, addresses)
        operator = Operator(cluster, settings, self.reconcilers, clock=self.clock)
        server = self._server(make_app(objects, addresses, self.folders, self))
        with self._socket() as listener:
            work = [
                asyncio.create_task(operator.run(), name="operator"),
                asyncio.create_task(services.run(), name="services"),
                asyncio.create_task(server.serve(sockets=[listener]), name="api"),
            ]
            self.kubelet.start()
            log.info("the embedded cluster runs in %s (addresses: %s)", self.folders.root, self.options.addresses)
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait((*work, stopping), return_when=asyncio.FIRST_COMPLETED)
            await self._end(work, server)
        await pods.close()

    async def _end(self, work: list[asyncio.Task[None]], server: uvicorn.Server) -> None:
        """First who decides, then the pods, then who carries their traffic."""
        failed = [task for task in work if task.done()]
        self._stop.set()
        operator, services, api = work
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        await self.kubelet.stop(self._grace_s)
        services.cancel()
        server.should_exit = True
        await asyncio.gather(services, api, return_exceptions=True)
        for task in failed:
            task.result()  # a part that ended by itself has failed: say why
            raise RuntimeError(f"{task.get_name()} ended by itself")
        log.info("every pod has ended, the state stays in %s", self.folders.root)

    def _node(self, objects: ObjectStore, addresses: Addresses) -> Node:
        return Node(
            objects=objects,
            runner=ShimRunner(),
            ask=ask_http,
            addresses=addresses,
            folders=self.folders,
            clock=self.clock,
            gpus=Gpus(find_devices(self.environment)),
            environment=node_environment(self.environment),
            python=sys.executable,
        )

    def _private_key(self) -> bytes:
        """Of this state folder; pods that it starts trust no other."""
        file = self.folders.control_key
        if not file.exists():
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as stream:
                stream.write(new_private_key())
        return file.read_bytes()

    @contextlib.contextmanager
    def _socket(self) -> Iterator[socket.socket]:
        self.folders.socket.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            with short_path(self.folders.socket) as path:
                listener.bind(path)
        finally:
            os.umask(mask)
        try:
            yield listener
        finally:
            listener.close()
            self.folders.socket.unlink(missing_ok=True)

    def _server(self, app: Starlette) -> uvicorn.Server:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        return _Server(config)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if self._leash is not None:
            loop.add_reader(self._leash, self._leash_ended)

    def _leash_ended(self) -> None:
        log.info("the terminal is gone")
        self.detach()
        self.stop()


class _Server(uvicorn.Server):
    """Signals belong to the supervisor."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[TextIO]:
    with file.open("a+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.seek(0)
            raise StateFolderTaken(
                f"{file.parent} belongs to a running supervisor (pid {held.read().strip()})"
            ) from None
        held.truncate(0)
        held.write(f"{os.getpid()}\n")
        held.flush()
        yield held
