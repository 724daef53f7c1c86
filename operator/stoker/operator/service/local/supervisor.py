"""The supervisor of a state folder: object store, operator, kubelet and Services in one process, behind a Unix socket.

It holds the folder's lock. It ends on SIGTERM, on `POST /v1/down`, and when the command that started it attached ends;
every pod gets its grace period first. When it is killed, its pods are killed as well.

Run by `main`, which `stoker local` starts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.operator.cluster.local.addresses import Addresses, Mode
from stoker.operator.cluster.local.folders import StateFolders, short_folders
from stoker.operator.cluster.local.gpus import Gpus, find_devices
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.machine import machine_capacity
from stoker.operator.cluster.local.node import Node
from stoker.operator.cluster.local.object_files import ObjectFiles
from stoker.operator.cluster.local.objects import Admit, ObjectStore
from stoker.operator.cluster.local.pod_environment import node_environment
from stoker.operator.cluster.local.probes import ask_http
from stoker.operator.cluster.local.process import ShimRunner
from stoker.operator.cluster.local.reservations import Reservations
from stoker.operator.cluster.local.state_lock import StateFolderReplaced, lock_state
from stoker.operator.cluster.local.whole_file import set_aside, write_whole
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import SystemClock, timestamp
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.operator import Operator, Reconciler
from stoker.operator.service.local.api import make_app
from stoker.operator.service.local.control_socket import ControlSocket
from stoker.operator.service.local.kube_api import kube_routes
from stoker.operator.service.local.kubelet import Kubelet
from stoker.operator.service.local.services import Services
from stoker.pod.control_key import new_private_key, public_key

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
RESYNC_INTERVAL_S = 60.0
TEND_S = 1.0
"""Time between two checks of lock and state folder."""
LOCK_FAILURES = 3
"""Checks in a row that must find the folder replaced before the supervisor ends."""


@dataclass(frozen=True)
class Options:
    """Options of the program."""

    state: Path
    addresses: Mode
    parent_pipe: int | None = None
    """File descriptor of a pipe that closes when the command that started this process ends."""


class Supervisor:
    """Call `run` once, in the main thread: pods are killed when the thread that started them ends."""

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
        self._parent_pipe = options.parent_pipe
        self._damaged: list[str] = []

    async def run(self) -> None:
        """Run until stopped and every pod has ended.

        Raises:
            StateFolderTaken, StateFolderReplaced.
        """
        self.folders.make()
        root = self.folders.root
        with lock_state(self.folders) as self._lock, short_folders(root) as self.folders, Reservations() as names:
            self._listen_to_signals()
            await self._run(Addresses(self.options.addresses, names.take, self.folders.addresses))

    def stop(self, grace_s: float | None = None) -> None:
        """Begin to stop; pods get their own grace period, at most `grace_s`."""
        self._grace_s = grace_s
        self._stop.set()

    def detach(self) -> None:
        """Stay when the command that started this process ends."""
        if self._parent_pipe is not None:
            asyncio.get_running_loop().remove_reader(self._parent_pipe)
            os.close(self._parent_pipe)
            self._parent_pipe = None

    def facts(self) -> dict[str, object]:
        """Collect what `stoker local status` shows."""
        return {
            "pid": os.getpid(),
            "state": str(self.folders.root),
            "addresses": self.options.addresses,
            "startedAt": self.started_at,
            "pods": self.kubelet.running,
            "detached": self._parent_pipe is None,
            "stopping": self._stop.is_set(),
            "problems": self.problems(),
        }

    def problems(self) -> list[str]:
        """List the problems of the state folder, one line each."""
        return [
            *self._damaged,
            *([self._addresses.problem] if self._addresses.problem else []),
            *self.objects.problems(),
        ]

    @property
    def writable(self) -> bool:
        """Whether the last write to the state folder succeeded."""
        return not self.objects.storage_problem

    async def _run(self, addresses: Addresses) -> None:
        self._addresses = addresses
        key = self._private_key()
        settings = Settings(
            control_public_keys={"control.pem": public_key(key).decode()},
            poll_interval_s=POLL_INTERVAL_S,
            resync_interval_s=RESYNC_INTERVAL_S,
            model_cache_path=str(self.folders.models),
        )
        objects = ObjectStore(
            now=self.clock.now,
            new_uid=lambda: str(uuid.uuid4()),
            admit=self.admit,
            storage=ObjectFiles(self.folders.objects, guard=self._lock.check),
        )
        self.objects = objects
        pods = PodHttp(key, self.clock, lambda: secrets.token_hex(16), poll_timeout_s=settings.poll_timeout_s)
        cluster = LocalCluster(objects, addresses, pods, self.clock)
        node = self._node(objects, addresses)
        self.kubelet = Kubelet(node)
        services = Services(objects, addresses)
        operator = Operator(cluster, settings, self.reconcilers, clock=self.clock)
        kube = kube_routes(cluster, self.folders, node.gpus)
        api = ControlSocket(self.folders.socket, make_app(objects, addresses, self.folders, self, kube))
        work = [
            asyncio.create_task(operator.run(), name="operator"),
            asyncio.create_task(services.run(), name="services"),
            asyncio.create_task(api.serve(), name="api"),
            asyncio.create_task(self._tend(), name="state folder"),
        ]
        self.kubelet.start()
        log.info("the embedded cluster runs in %s (addresses: %s)", self.folders.root, self.options.addresses)
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait((*work, stopping), return_when=asyncio.FIRST_COMPLETED)
        await self._end(work)
        await pods.close()

    async def _tend(self) -> None:
        """Check the lock, and repair a state folder that could not be written.

        Raises:
            StateFolderReplaced: this process may not use the folder any more.
        """
        failures = 0
        while True:
            try:
                self._lock.check()
                self.objects.repair()
                failures = 0
            except StateFolderReplaced as problem:
                failures += 1
                if failures >= LOCK_FAILURES:
                    log.error("%s: %s; every pod is killed", problem.filename, problem.strerror)
                    self._grace_s = 0.0
                    raise
            except OSError as problem:
                log.error("the lock cannot be checked: %s", problem)
            await self.clock.sleep(TEND_S)

    async def _end(self, work: list[asyncio.Task[None]]) -> None:
        """End the operator first, then the pods, then Services and API."""
        failed = [task for task in work if task.done()]
        self._stop.set()
        operator, services, api, tend = work
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        await self.kubelet.stop(self._grace_s)
        for task in (services, api, tend):
            task.cancel()
        await asyncio.gather(services, api, tend, return_exceptions=True)
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
            capacity=machine_capacity(),
            environment=node_environment(self.environment),
            python=sys.executable,
        )

    def _private_key(self) -> bytes:
        """Read or make the key that this folder's pods trust; a damaged one is replaced."""
        file = self.folders.control_key
        if file.exists():
            try:
                key = file.read_bytes()
                public_key(key)
                return key
            except (ValueError, TypeError, AttributeError) as error:
                self._damaged.append(f"{set_aside(file)}: not a private key ({error}); a new one was made")
        key = new_private_key()
        write_whole(file, key)
        return key

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if self._parent_pipe is not None:
            loop.add_reader(self._parent_pipe, self._parent_ended)

    def _parent_ended(self) -> None:
        log.info("the command that started this supervisor has ended")
        self.detach()
        self.stop()
