"""One replica of the operator: HTTP and Kopf's shell always, the operator itself while it holds the Lease.

Made by `__main__`. Owns the life of all parts; the state of the cluster belongs to the loop's store.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from stoker.operator.cluster.fenced import FencedCluster
from stoker.operator.cluster.interface import Cluster, ClusterError
from stoker.operator.cluster.kinds import device_kinds
from stoker.operator.cluster.kube.connection import ApiConnection
from stoker.operator.cluster.kube.credentials import Access, own_namespace
from stoker.operator.cluster.kube.kube_cluster import KubeCluster, View
from stoker.operator.cluster.kube.pod_addresses import PodAddresses
from stoker.operator.cluster.kube.rate_limit import RateLimit
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.domain.clock import Clock, SystemClock, timestamp
from stoker.operator.domain.labels import MANAGED_BY
from stoker.operator.domain.plan import Key
from stoker.operator.loop.metrics import OperatorMetrics, OperatorState
from stoker.operator.loop.operator import WATCHED, Operator
from stoker.operator.loop.store import key_of
from stoker.operator.service.config import OperatorConfig
from stoker.operator.service.discovery import discover
from stoker.operator.service.key_ring import KeyRing, KeySecret, read_folder
from stoker.operator.service.lease import Elector, Terms
from stoker.operator.service.lease_object import KubeLease
from stoker.operator.service.reconcilers import RECONCILERS
from stoker.operator.service.rights import check_rights, cluster_wide
from stoker.operator.service.shell import Shell, connection_info
from stoker.pod.config_file import ConfigError
from stoker.pod.http import probe_routes
from stoker.pod.serve import Server, bind_tcp

log = logging.getLogger(__name__)

STUCK_S = 180.0
"""Silence of an informer or of the elector after which the process counts as dead."""
KEYS_S = 60.0
"""Time between two reads of the control key."""
SCHEDULERS_S = 60.0
"""Time between two looks at the API groups."""
LEASE_QPS = 10.0
VIEW = View(
    labels=dict.fromkeys(("Pod", "Service", "PodDisruptionBudget", "NetworkPolicy"), MANAGED_BY),
    metadata_only=frozenset({"ConfigMap", "Secret"}),
)
"""Pods of others are not listed; of ConfigMaps and Secrets only the metadata is read."""


class OperatorProgram:
    """One replica. Construct and `run` it inside one event loop."""

    def __init__(self, config: OperatorConfig, *, clock: Clock | None = None) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.access = Access(config.api.kubeconfig, config.api.context)
        self.namespace = self._namespace()
        self.identity = config.identity or f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self.metrics = OperatorMetrics()
        self.metrics.watch(self._state)
        self.operator: Operator | None = None
        lease = KubeLease(self._connection(LEASE_QPS, 20), self.namespace, config.lease.name)
        self._lease = lease
        terms = Terms(config.lease.duration_s, config.lease.renew_deadline_s, config.lease.retry_s)
        self.elector = Elector(lease, self.identity, terms, self.clock)
        self.shell = (
            Shell(
                partial(connection_info, self.access), self._wake, namespaces=config.namespaces, kinds=config.wake_ups
            )
            if config.wake_ups
            else None
        )
        self.server = Server(self._app(), bind_tcp(config.listen.host, config.listen.port))

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop`; then end the work, give the Lease back, and stop the server last.

        Raises:
            Exception: raised by the operator's loop.
        """
        await self.server.start()
        log.info("%s listens on port %d", self.identity, self.server.port)
        if self.shell is not None:
            self.shell.start()
        try:
            await self.elector.run(self._lead, stop)
        finally:
            if self.shell is not None:
                await self.shell.stop()
            await self._lease.connection.close()
            await self.server.stop(2.0)

    async def _lead(self) -> None:
        """Run the operator; only the holder of the Lease does."""
        config = self.config
        folder = config.control_key.folder
        pods = PodHttp(b"", self.clock, lambda: secrets.token_hex(16), poll_timeout_s=config.poll.timeout_s)
        connection = self._connection(config.api.qps, config.api.burst, self.metrics.requested)
        size, addresses = config.api.page_size, PodAddresses()
        kube = KubeCluster(connection, pods, view=VIEW, page_size=size, addresses=addresses)
        everything = KubeCluster(connection, pods, view=View(), page_size=size, addresses=addresses)
        cluster = FencedCluster(kube, self.elector.valid)
        try:
            secret = KeySecret(
                cluster,
                self.clock,
                self.namespace,
                config.control_key.secret,
                rotate_days=config.control_key.rotate_days,
            )
            ring = read_folder(Path(folder)) if folder else await self._first_keys(secret)
            pods.private_key = ring.current
            await check_rights(connection, cluster_wide(config))
            self.operator = self._operator(cluster, everything, ring)
            await self._adopt_schedulers(connection, self.operator)
            self.metrics.lead(True)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.operator.run())
                tasks.create_task(self._follow_keys(secret, pods, ring))
                tasks.create_task(self._follow_schedulers(connection, self.operator))
        finally:
            self.metrics.lead(False)
            self.operator = None
            await kube.close()

    def _operator(self, cluster: Cluster, everything: Cluster, ring: KeyRing) -> Operator:
        watch = self.config.watch
        sees_all = watch.nodes and watch.pods and not self.config.namespaces
        left_out = {name for name, seen in (("Secret", watch.secrets), ("Node", watch.nodes)) if not seen}
        return Operator(
            cluster,
            replace(
                self.config.settings(),
                control_public_keys=ring.public_keys(),
                network_policies=self.config.policies(self.namespace),
            ),
            RECONCILERS,
            clock=self.clock,
            jitter=random.random,
            namespaces=self.config.namespaces,
            kinds=[kind for kind in WATCHED if kind not in left_out],
            metrics=self.metrics,
            everything=everything if sees_all else None,
        )

    async def _first_keys(self, secret: KeySecret) -> KeyRing:
        """Wait until the keys can be read: a pod that starts without them could not verify any control call."""
        while True:
            try:
                return await secret.read()
            except ClusterError as error:
                log.warning("the control key cannot be read: %s", error)
                await self.clock.sleep(self.config.lease.retry_s)

    async def _follow_keys(self, secret: KeySecret, pods: PodHttp, ring: KeyRing) -> None:
        """Adopt keys that changed, and write them to every namespace with pods."""
        folder = self.config.control_key.folder
        operator = self.operator
        assert operator is not None
        while True:
            try:
                newest = read_folder(Path(folder)) if folder else await secret.read()
                if newest != ring:
                    log.info("the control key has changed")
                    pods.private_key = newest.current
                    ring = newest
                    operator.settings = replace(operator.settings, control_public_keys=ring.public_keys())
                if operator.synced:
                    await operator.keys.renew()
            except (ClusterError, ValueError) as error:
                log.warning("the control key was not brought up to date: %s", error)
            await self.clock.sleep(KEYS_S)

    async def _follow_schedulers(self, connection: ApiConnection, operator: Operator) -> None:
        """Notice Kueue or Volcano when they are installed later."""
        while True:
            await self.clock.sleep(SCHEDULERS_S)
            await self._adopt_schedulers(connection, operator)

    async def _adopt_schedulers(self, connection: ApiConnection, operator: Operator) -> None:
        """Give the found schedulers to the reconcilers; jobs look again when there are others than before."""
        try:
            found = await discover(connection)
        except ClusterError as error:
            log.warning("the API groups cannot be read, known schedulers stay: %s", error)
            return
        if found != operator.settings.installed:
            log.info("schedulers and devices of the cluster: %s", found)
            operator.settings = replace(operator.settings, installed=found)
            if found.devices:
                operator.watch_devices(self._with_devices(connection, found.devices))
            for job in operator.store.of_kind("TrainingJob"):
                operator.queue.add(key_of(job))

    def _with_devices(self, connection: ApiConnection, api_version: str) -> KubeCluster:
        """The cluster with the kinds of dynamic resource allocation in view."""
        pods = PodHttp(b"", self.clock, lambda: "", poll_timeout_s=self.config.poll.timeout_s)
        return KubeCluster(connection, pods, page_size=self.config.api.page_size, more_kinds=device_kinds(api_version))

    def _wake(self, key: Key) -> None:
        """Put a key on the queue because Kopf saw a change."""
        self.metrics.woken()
        if self.operator is not None:
            self.operator.queue.add(key)

    def _state(self) -> OperatorState | None:
        return self.operator.state() if self.operator is not None else None

    def _alive(self) -> bool:
        operator = self.operator
        silent = self.elector.stuck_s() if operator is None else max(operator.stuck_s(), self.elector.stuck_s())
        return silent < STUCK_S

    def _ready(self) -> bool:
        """Whether the operator is synced, or stands by and has read the Lease."""
        return self.operator.synced if self.operator is not None else self.elector.holder != ""

    def _status(self) -> Mapping[str, Any]:
        operator = self.operator
        status: dict[str, Any] = {
            "identity": self.identity,
            "leading": self.elector.leading,
            "leader": self.elector.holder,
            "transitions": self.elector.transitions,
            "namespaces": list(self.config.namespaces),
            "time": timestamp(self.clock.now()),
        }
        if operator is not None:
            now = operator.state()
            silence = {kind: round(seconds, 1) for kind, seconds in now.silence_s.items()}
            status |= {
                "synced": operator.synced,
                "queue": now.queue,
                "objects": dict(now.objects),
                "silence_s": silence,
            }
        return status

    def _app(self) -> Starlette:
        return Starlette(
            routes=probe_routes(
                alive=self._alive, ready=self._ready, status=self._status, registry=self.metrics.registry
            )
        )

    def _connection(self, qps: float, burst: int, listener: Any = None) -> ApiConnection:
        limit = RateLimit(self.clock, per_second=qps, burst=burst)
        return ApiConnection(self.access, limit, timeout_s=self.config.api.timeout_s, listener=listener)

    def _namespace(self) -> str:
        found = self.config.namespace or own_namespace(self.access)
        if found is None:
            raise ConfigError("namespace is missing: outside a pod nothing else tells where the Lease is")
        return found
