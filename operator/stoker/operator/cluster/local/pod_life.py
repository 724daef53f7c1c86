"""The life of one pod on this machine: scheduled, started, watched, ended. One task each, woken by the kubelet.

The pod's status is written by this task only. A full disk delays a step of the life; it never ends it.

The task owns the pod's processes; its status goes through `pod_status_writer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker.operator.cluster.local.node import Node
from stoker.operator.cluster.local.object_body import DEFAULT_GRACE_S
from stoker.operator.cluster.local.pod_address import container_port, host_of
from stoker.operator.cluster.local.pod_command import pod_rewriter, prepare_command
from stoker.operator.cluster.local.pod_end import terminated_state, termination_message
from stoker.operator.cluster.local.pod_environment import environment_sources
from stoker.operator.cluster.local.pod_schedule import schedule
from stoker.operator.cluster.local.pod_status import NODE, PodView
from stoker.operator.cluster.local.pod_status_writer import PodStatusWriter
from stoker.operator.cluster.local.probes import ContainerProbes
from stoker.operator.cluster.local.process import Process, ProcessExit, StartError
from stoker.operator.cluster.local.stored_write import until_stored
from stoker.operator.cluster.local.volumes import MountError, PodVolumes
from stoker.operator.domain.plan import Key, Object, Ref

log = logging.getLogger(__name__)

RETRY_PREPARE_S = 2.0
"""Time between two attempts to prepare a pod after an error of the file system."""


@dataclass(frozen=True)
class _Stop:
    """A reason from outside to stop a running pod."""

    grace_s: float
    reason: str = ""
    message: str = ""
    disrupted: str = ""


class PodLife:
    """The life of one pod, from its creation to its end. `run` returns when nothing is left to do for it."""

    def __init__(self, pod: Object, node: Node, release: Callable[[], None]) -> None:
        metadata = pod["metadata"]
        self.ref = Ref("Pod", metadata["namespace"], metadata["name"], metadata["uid"])
        self.node = node
        self.release = release
        self.volumes = PodVolumes(pod, node.folders.pod(pod), node.folders.claims, node.objects.find)
        self.sources = self.volumes.sources() | environment_sources(pod)
        """ConfigMaps, Secrets and claims whose change matters."""
        container = pod["spec"]["containers"][0]
        view = PodView(name=container["name"], image=container.get("image", ""))
        self.status = PodStatusWriter(self.ref, node, view)
        self._seen = asyncio.Event()
        self._shutdown: _Stop | None = None
        self._running = False

    def poke(self) -> None:
        """Look again: something that this pod may wait for has changed."""
        self._seen.set()

    def source_changed(self, key: Key) -> None:
        """Bring mounted files up to date with a ConfigMap or Secret."""
        pod = self.status.pod()
        if self._running and pod is not None:
            try:
                self.volumes.refresh(key, pod_rewriter(pod, self.node, self.volumes).file)
            except (MountError, OSError) as error:
                log.warning("pod %s/%s: %s was not refreshed: %s", *self.ref[1:3], key.name, error)
        self.poke()

    def shut_down(self, grace_s: float | None) -> None:
        """End the pod because the machine goes down."""
        pod = self.status.pod()
        own = float((pod or {}).get("spec", {}).get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
        self._shutdown = _Stop(
            grace_s=own if grace_s is None else min(own, grace_s),
            reason="Terminated",
            message="Pod was terminated because the embedded cluster shuts down.",
            disrupted="TerminationByKubelet",
        )
        self.poke()

    async def run(self) -> None:
        """Live the whole life."""
        try:
            if await self._schedule():
                await self._main()
        finally:
            self.node.gpus.give_back(self.ref.uid)
            self.release()
        await self.conclude()

    def mark_lost(self) -> None:
        """Report that the pod ran when the supervisor ended: its processes are gone."""
        self._fail("ContainerStatusUnknown", "the supervisor ended while the pod ran", disrupted="TerminationByKubelet")

    def mark_broken(self, error: Exception) -> None:
        """Report a pod that the embedded cluster cannot run because of an error of its own."""
        self._fail("InternalError", f"the embedded cluster failed: {error!r} (supervisor.log has the traceback)")

    async def conclude(self) -> None:
        """Wait until the last status is stored, then remove the pod if it is being deleted."""
        while self.status.behind:
            if self._shutdown is not None:
                self.status.give_up()
                return
            written = asyncio.ensure_future(self.status.wait_until_written())
            await self._first_of(written)
        pod = self.status.pod()
        if pod is not None and pod["metadata"].get("deletionTimestamp"):
            await self._until_stored(lambda: self.node.objects.delete(self.ref, grace_s=0))

    # Before the start

    async def _schedule(self) -> bool:
        """Wait for gates, claims and GPUs; False when the pod is deleted (or the machine goes down) before."""
        while True:
            pod = self._wanted_pod()
            if pod is None:
                return False
            obstacle = schedule(pod, self.sources, self.node.objects.find, self.node.gpus, self.node.capacity)
            if obstacle is None:
                break
            reason, message = obstacle
            self.status.write(replace(self.status.view, schedule_reason=reason, schedule_message=message))
            await self._change()
        if not pod["spec"].get("nodeName"):
            bind = {"spec": {"nodeName": NODE}}
            if not await self._until_stored(lambda: self.node.objects.patch(self.ref, bind)):
                return False
        self.status.write(self._bound())
        return True

    def _bound(self) -> PodView:
        view = replace(self.status.view, scheduled=True, schedule_reason="", schedule_message="")
        return replace(view, accepted_at=self.node.now())

    async def _started(self) -> Process | None:
        """Start the pod's process once everything that it needs exists; None when the pod ends before."""
        while True:
            pod = self._wanted_pod()
            if pod is None:
                return None
            try:
                command = prepare_command(pod, self.node, self.volumes)
                self.status.view = replace(self.status.view, ip=self.node.addresses.ip(host_of(pod)))
                return await self.node.runner.start(command)
            except StartError as error:
                self._fail("StartError", str(error), code=128)
                return None
            except MountError as error:
                self.status.write(replace(self.status.view, waiting_message=str(error)))
                await self._change()
            except OSError as error:
                self.status.write(replace(self.status.view, waiting_message=str(error)))
                await self._first_of(asyncio.ensure_future(self.node.clock.sleep(RETRY_PREPARE_S)))

    # From start to end

    async def _main(self) -> None:
        process = await self._started()
        pod = self.status.pod()
        if process is None:
            return
        if pod is None:  # deleted by force while the process started
            process.kill()
            await process.wait()
            return
        self._running = True
        has_probes = any(pod["spec"]["containers"][0].get(name) for name in ("startupProbe", "readinessProbe"))
        started = replace(self.status.view, started_at=self.node.now(), container_id=f"process://{process.pid}")
        self.status.write(replace(started, started=not has_probes, ready=not has_probes))
        try:
            ended, stop = await self._watch(process, pod)
        finally:
            self._running = False
        self._finish(pod, ended, stop)

    async def _watch(self, process: Process, pod: Object) -> tuple[ProcessExit, _Stop | None]:
        """Wait until every process of the pod has ended, by itself or because it was stopped."""
        end = asyncio.ensure_future(process.wait())
        stopped = asyncio.ensure_future(self._stopped(pod))
        try:
            await asyncio.wait((end, stopped), return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                return end.result(), None
            stop = stopped.result()
            return await self._stop(process, end, stop), stop
        except BaseException:
            process.kill()  # no process outlives the task that watches it
            raise
        finally:
            stopped.cancel()

    async def _stop(self, process: Process, end: asyncio.Future[ProcessExit], stop: _Stop) -> ProcessExit:
        if stop.grace_s > 0:
            process.terminate()
            patience = asyncio.ensure_future(self._forced_or_after(stop.grace_s))
            await asyncio.wait((end, patience), return_when=asyncio.FIRST_COMPLETED)
            patience.cancel()
        if not end.done():
            process.kill()
        return await end

    async def _forced_or_after(self, grace_s: float) -> None:
        """Wait for the end of the grace period, or for a forced deletion (the object is gone)."""
        timer = asyncio.ensure_future(self.node.clock.sleep(grace_s))
        try:
            while self.status.pod() is not None and not timer.done():
                change = asyncio.ensure_future(self._change())
                await asyncio.wait((timer, change), return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
        finally:
            timer.cancel()

    async def _stopped(self, pod: Object) -> _Stop:
        """Wait for a reason from outside to stop the pod."""
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
        pod = self.status.pod()
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

        def report(started: bool, ready: bool) -> None:
            self.status.write(replace(self.status.view, started=started, ready=ready))

        return ContainerProbes(pod["spec"]["containers"][0], find_port, self.node.ask, self.node.clock, report)

    def _finish(self, pod: Object, ended: ProcessExit, stop: _Stop | None) -> None:
        view = self.status.view
        pod_log = self.node.folders.log(self.ref.namespace, self.ref.name)
        terminated = terminated_state(
            ended.code,
            "Completed" if ended.code == 0 else "Error",
            message=termination_message(pod["spec"]["containers"][0], ended, self.volumes.termination_log, pod_log),
            now=self.node.now(),
            started_at=view.started_at,
            container_id=view.container_id,
        )
        if ended.signal is not None:
            terminated["signal"] = ended.signal
        view = replace(view, terminated=terminated, ready=False)
        if stop is not None and (stop.reason != "Terminated" or ended.code != 0):
            view = replace(view, reason=stop.reason, message=stop.message, disrupted=stop.disrupted)
        self.status.write(view)

    def _fail(self, reason: str, message: str, *, code: int = 137, disrupted: str = "") -> None:
        """Report an end without an exit code of the container's own."""
        view = self.status.view if self.status.view.scheduled else self._bound()
        terminated = terminated_state(
            code, reason, message=message, now=self.node.now(), container_id=view.container_id
        )
        self.status.write(replace(view, terminated=terminated, ready=False, disrupted=disrupted))

    # Waiting

    def _wanted_pod(self) -> Object | None:
        """The pod while it is still to be started."""
        pod = self.status.pod()
        if pod is None or pod["metadata"].get("deletionTimestamp") or self._shutdown:
            return None
        return pod

    async def _change(self) -> None:
        await self._seen.wait()
        self._seen.clear()

    async def _first_of(self, other: asyncio.Future[None]) -> None:
        """Wait for a change or for `other`, which is cancelled then."""
        change = asyncio.ensure_future(self._change())
        try:
            await asyncio.wait((change, other), return_when=asyncio.FIRST_COMPLETED)
        finally:
            change.cancel()
            other.cancel()

    async def _until_stored(self, write: Callable[[], object]) -> bool:
        return await until_stored(write, self.node.clock, give_up=lambda: self._shutdown is not None)
