"""The life of one pod on this machine: gates, room, volumes, start, probes, end. One task each, told of changes by the kubelet.

Only this task writes the pod's status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.operator.cluster.interface import Conflict, NotFound
from stoker.operator.cluster.local.addresses import Addresses, Host
from stoker.operator.cluster.local.folders import StateFolders
from stoker.operator.cluster.local.gpus import Gpus, wanted_gpus
from stoker.operator.cluster.local.objects import DEFAULT_GRACE_S, ObjectStore
from stoker.operator.cluster.local.pod_environment import (
    container_command,
    container_environment,
    environment_sources,
    with_interpreter,
)
from stoker.operator.cluster.local.pod_status import NODE, PodView, render_status
from stoker.operator.cluster.local.probes import Ask, ContainerProbes
from stoker.operator.cluster.local.process import Command, Exit, Process, Runner, StartError
from stoker.operator.cluster.local.rewrite import Rewriter
from stoker.operator.cluster.local.volumes import MountError, PodVolumes
from stoker.operator.domain.clock import Clock, timestamp
from stoker.operator.domain.plan import Key, Object, Ref

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4096
MAX_LOG_TAIL_BYTES = 2048


@dataclass(frozen=True)
class Node:
    """This machine, as all pods share it."""

    objects: ObjectStore
    runner: Runner
    ask: Ask
    addresses: Addresses
    folders: StateFolders
    clock: Clock
    gpus: Gpus
    environment: Mapping[str, str]
    """What every pod inherits."""
    python: str
    """The interpreter that `python` in a command means."""

    def now(self) -> str:
        return timestamp(self.clock.now())


@dataclass(frozen=True)
class _Stop:
    """Why a running pod is to be stopped from outside."""

    grace_s: float
    reason: str = ""
    message: str = ""
    disrupted: str = ""


def host_of(pod: Object) -> Host:
    """The pod's name in DNS."""
    metadata = pod["metadata"]
    return Host("pod", metadata["namespace"], pod["spec"].get("hostname") or metadata["name"])


def container_port(pod: Object, port: int | str) -> int:
    """A port by number or by name."""
    if isinstance(port, int) or port.isdigit():
        return int(port)
    for known in pod["spec"]["containers"][0].get("ports") or ():
        if known.get("name") == port:
            return int(known["containerPort"])
    raise ValueError(f"pod {pod['metadata']['name']} has no port named {port!r}")


class PodLife:
    """From the first sight of a pod to its end. `run` returns when nothing is left to do for it."""

    def __init__(self, pod: Object, node: Node, release: Callable[[], None]) -> None:
        metadata = pod["metadata"]
        self.ref = Ref("Pod", metadata["namespace"], metadata["name"], metadata["uid"])
        self.node = node
        self.release = release
        self.volumes = PodVolumes(pod, node.folders.pod(pod), node.folders.claims, node.objects.find)
        self.sources = self.volumes.sources() | environment_sources(pod)
        """ConfigMaps, Secrets and claims whose change matters."""
        self._seen = asyncio.Event()
        self._shutdown: _Stop | None = None
        self._running = False
        container = pod["spec"]["containers"][0]
        self._view = PodView(name=container["name"], image=container.get("image", ""))

    def poke(self) -> None:
        """Something that this pod may wait for has changed."""
        self._seen.set()

    def source_changed(self, key: Key) -> None:
        """A ConfigMap or Secret is new: mounted files follow it."""
        pod = self._pod()
        if self._running and pod is not None:
            try:
                self.volumes.refresh(key, self._rewriter(pod).file)
            except (MountError, OSError) as error:
                log.warning("pod %s/%s: %s was not refreshed: %s", *self.ref[1:3], key.name, error)
        self.poke()

    def shut_down(self, grace_s: float | None) -> None:
        """End the pod because the machine goes down."""
        pod = self._pod()
        own = float((pod or {}).get("spec", {}).get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
        self._shutdown = _Stop(
            grace_s=own if grace_s is None else min(own, grace_s),
            reason="Terminated",
            message="Pod was terminated because the embedded cluster shuts down.",
            disrupted="TerminationByKubelet",
        )
        self.poke()

    async def run(self) -> None:
        try:
            if await self._schedule():
                await self._main()
        finally:
            self.node.gpus.give_back(self.ref.uid)
            self.release()
        pod = self._pod()
        if pod is not None and pod["metadata"].get("deletionTimestamp"):
            self.node.objects.delete(self.ref, grace_s=0)

    def mark_lost(self) -> None:
        """The pod ran when the supervisor ended: its processes are gone."""
        self._view = replace(
            self._bound(),
            terminated=self._terminated(137, "ContainerStatusUnknown", "the supervisor ended while the pod ran", ""),
        )
        self._view = replace(self._view, disrupted="TerminationByKubelet")
        self._write()

    # Before the start

    async def _schedule(self) -> bool:
        """Wait for gates, claims and GPUs; False when the pod is deleted (or the machine goes down) before."""
        while True:
            pod = self._pod()
            if pod is None or pod["metadata"].get("deletionTimestamp") or self._shutdown:
                return False
            reason, message = self._obstacle(pod)
            if not reason:
                break
            self._view = replace(self._view, schedule_reason=reason, schedule_message=message)
            self._write()
            await self._change()
        if not pod["spec"].get("nodeName"):
            self.node.objects.patch(self.ref, {"spec": {"nodeName": NODE}})
        self._view = self._bound()
        self._write()
        return True

    def _obstacle(self, pod: Object) -> tuple[str, str]:
        if pod["spec"].get("schedulingGates"):
            return "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates"
        for key in sorted(self.volumes.sources()):
            if key.kind == "PersistentVolumeClaim" and self.node.objects.find(key) is None:
                return "Unschedulable", f'persistentvolumeclaim "{key.name}" not found'
        wanted = wanted_gpus(pod)
        if self.node.gpus.take(self.ref.uid, wanted) is None:
            have = f"{len(self.node.gpus.free)} of {len(self.node.gpus.devices)} are free, {wanted} are needed"
            return "Unschedulable", f"0/1 nodes are available: 1 Insufficient nvidia.com/gpu ({have})"
        return "", ""

    def _bound(self) -> PodView:
        return replace(self._view, scheduled=True, schedule_reason="", schedule_message="", accepted_at=self.node.now())

    async def _prepared(self) -> Command | None:
        """Volumes and command, once everything they need is there; None when the pod is deleted before."""
        while True:
            pod = self._pod()
            if pod is None or pod["metadata"].get("deletionTimestamp") or self._shutdown:
                return None
            try:
                return self._prepare(pod)
            except (MountError, OSError) as error:
                self._view = replace(self._view, waiting_message=str(error))
                self._write()
            await self._change()

    def _prepare(self, pod: Object) -> Command:
        rewriter = self._rewriter(pod)
        self.volumes.prepare(rewriter.file)
        folder = self.node.folders.pod(pod) / "cwd"
        folder.mkdir(mode=0o700, exist_ok=True)
        log_file = self.node.folders.log(self.ref.namespace, self.ref.name)
        log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_file.unlink(missing_ok=True)
        own = container_environment(pod, self.node.addresses.ip(host_of(pod)), self.node.objects.find)
        working = pod["spec"]["containers"][0].get("workingDir")
        return Command(
            argv=with_interpreter([rewriter.text(word) for word in container_command(pod, own)], self.node.python),
            environment={**self.node.environment, **self._machine(pod), **rewriter.environment(own)},
            folder=Path(rewriter.text(working)) if working else folder,
            log=log_file,
        )

    def _machine(self, pod: Object) -> dict[str, str]:
        """What the node itself decides: devices, and the interface between pods."""
        devices = self.node.gpus.take(self.ref.uid, wanted_gpus(pod)) or ()
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(devices),
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "HOSTNAME": self.ref.name,
            "PYTHONUNBUFFERED": "1",
        }

    def _rewriter(self, pod: Object) -> Rewriter:
        services = self.node.objects.of_kind("Service", self.ref.namespace)
        return Rewriter(
            namespace=self.ref.namespace,
            own=host_of(pod),
            paths=self.volumes.paths(),
            addresses=self.node.addresses,
            subdomain=pod["spec"].get("subdomain", ""),
            services=frozenset(service["metadata"]["name"] for service in services),
        )

    # From start to end

    async def _main(self) -> None:
        command = await self._prepared()
        pod = self._pod()
        if command is None or pod is None:
            return
        self._view = replace(self._view, ip=self.node.addresses.ip(host_of(pod)))
        try:
            process = await self.node.runner.start(command)
        except StartError as error:
            self._view = replace(self._view, terminated=self._terminated(128, "StartError", str(error), ""))
            self._write()
            return
        self._running = True
        started_at = self.node.now()
        has_probes = any(pod["spec"]["containers"][0].get(name) for name in ("startupProbe", "readinessProbe"))
        self._view = replace(
            self._view,
            started_at=started_at,
            container_id=f"process://{process.pid}",
            started=not has_probes,
            ready=not has_probes,
        )
        self._write()
        ended, stop = await self._watch(process, pod)
        self._running = False
        self._finish(pod, ended, stop, started_at)

    async def _watch(self, process: Process, pod: Object) -> tuple[Exit, _Stop | None]:
        """Until every process of the pod has ended, by itself or because it was stopped."""
        end = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(self._stopped(pod))
        try:
            await asyncio.wait((end, stopped), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return end.result(), None
            stop = stopped.result()
            return await self._stop(process, end, stop), stop
        except asyncio.CancelledError:
            process.kill()
            raise
        finally:
            stopped.cancel()

    async def _stop(self, process: Process, end: asyncio.Future[Exit], stop: _Stop) -> Exit:
        if stop.grace_s > 0:
            process.terminate()
            patience = asyncio.ensure_future(self._forced_or_after(stop.grace_s))
            await asyncio.wait((end, patience), return_when=asyncio.FIRST_COMPLETED)
            patience.cancel()
        if not end.done():
            process.kill()
        return await end

    async def _forced_or_after(self, grace_s: float) -> None:
        """The end of the grace period, or a forced deletion (the object is gone)."""
        timer = asyncio.ensure_future(self.node.clock.sleep(grace_s))
        try:
            while self._pod() is not None and not timer.done():
                change = asyncio.ensure_future(self._change())
                await asyncio.wait((timer, change), return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        finally:
            timer.cancel()

    async def _stopped(self, pod: Object) -> _Stop:
        """Waits for a reason from outside to stop the pod."""
        grace_s = float(pod["spec"].get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
        probes = asyncio.ensure_future(self._probes(pod).run())
        deadline = asyncio.ensure_future(self._deadline(pod))
        try:
            while True:
                stop = self._asked_to_stop()
                if stop is not None:
                    return stop
                change = asyncio.ensure_future(self._change())
                await asyncio.wait((change, probes, deadline), return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if deadline.done():
                    message = "Pod was active on the node longer than the specified deadline"
                    return _Stop(grace_s, reason="DeadlineExceeded", message=message)
                if probes.done():
                    return _Stop(grace_s, reason="Unhealthy", message=probes.result())
        finally:
            probes.cancel()
            deadline.cancel()

    def _asked_to_stop(self) -> _Stop | None:
        pod = self._pod()
        if pod is None:
            return _Stop(grace_s=0)
        if pod["metadata"].get("deletionTimestamp"):
            return _Stop(grace_s=float(pod["metadata"].get("deletionGracePeriodSeconds", 0)))
        return self._shutdown

    async def _deadline(self, pod: Object) -> None:
        seconds = pod["spec"].get("activeDeadlineSeconds")
        if seconds is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self.node.clock.sleep(float(seconds))

    def _probes(self, pod: Object) -> ContainerProbes:
        host = host_of(pod)

        def find_port(port: int | str) -> tuple[str, int]:
            return self.node.addresses.ip(host), self.node.addresses.port(host, container_port(pod, port))

        def tell(started: bool, ready: bool) -> None:
            self._view = replace(self._view, started=started, ready=ready)
            self._write()

        return ContainerProbes(pod["spec"]["containers"][0], find_port, self.node.ask, self.node.clock, tell)

    def _finish(self, pod: Object, ended: Exit, stop: _Stop | None, started_at: str) -> None:
        message = self._last_message(pod["spec"]["containers"][0], ended)
        reason = "Completed" if ended.code == 0 else "Error"
        terminated = self._terminated(ended.code, reason, message, started_at)
        if ended.signal is not None:
            terminated["signal"] = ended.signal
        self._view = replace(self._view, terminated=terminated, ready=False)
        if stop is not None and (stop.reason != "Terminated" or ended.code != 0):
            self._view = replace(self._view, reason=stop.reason, message=stop.message, disrupted=stop.disrupted)
        self._write()

    def _terminated(self, code: int, reason: str, message: str, started_at: str) -> dict[str, Any]:
        now = self.node.now()
        found = {
            "exitCode": code,
            "reason": reason,
            "startedAt": started_at or now,
            "finishedAt": now,
            "containerID": self._view.container_id,
        }
        return found | ({"message": message} if message else {})

    def _last_message(self, container: Mapping[str, Any], ended: Exit) -> str:
        try:
            message = self.volumes.termination_log.read_bytes()[:MAX_MESSAGE_BYTES].decode(errors="replace")
        except OSError:
            message = ""
        from_log = container.get("terminationMessagePolicy") == "FallbackToLogsOnError" and ended.code != 0
        if message or not from_log:
            return message
        return tail(self.node.folders.log(self.ref.namespace, self.ref.name), MAX_LOG_TAIL_BYTES)

    # Small things

    def _pod(self) -> Object | None:
        """The object now, or None when it is gone or a namesake took its place."""
        found = self.node.objects.find(Key(*self.ref[:3]))
        return found if found is not None and found["metadata"]["uid"] == self.ref.uid else None

    def _write(self) -> None:
        pod = self._pod()
        if pod is None:
            return
        try:
            self.node.objects.update_status(
                self.ref, render_status(self._view, pod.get("status") or {}, self.node.now())
            )
        except (NotFound, Conflict):
            log.debug("pod %s/%s went while its status was written", self.ref.namespace, self.ref.name)

    async def _change(self) -> None:
        await self._seen.wait()
        self._seen.clear()


def tail(file: Path, max_bytes: int) -> str:
    """The end of a text file, empty when there is none."""
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - max_bytes))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
