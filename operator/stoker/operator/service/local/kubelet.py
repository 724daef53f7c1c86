"""Runs the pods of the object store on this machine: one task per pod, woken when something it waits for changes.

Owned by the supervisor. It owns the pods' tasks; each task writes its pod's status.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable

from stoker.operator.cluster.local.node import Node
from stoker.operator.cluster.local.pod_life import PodLife
from stoker.operator.cluster.local.stored_write import try_store, until_stored
from stoker.operator.cluster.local.watch_history import Record
from stoker.operator.domain.plan import Object, Ref
from stoker.operator.loop.store import key_of

log = logging.getLogger(__name__)


class Kubelet:
    """The kubelet of this machine. Started once, within a running event loop."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._lives: dict[str, PodLife] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._repeated: set[asyncio.Task[bool]] = set()
        """Writes that failed and are tried again."""
        self._stopping = False

    def start(self) -> None:
        """Begin the life of every pod that is there; those that ran when the last supervisor ended are lost."""
        self.node.objects.listeners.append(self._on_change)
        for claim in self.node.objects.of_kind("PersistentVolumeClaim"):
            self._bind(claim)
        for pod in self.node.objects.of_kind("Pod"):
            if not _has_ended(pod):
                self._begin_life(pod)
        self._remove_leftovers()

    async def stop(self, grace_s: float | None = None) -> None:
        """End every pod within its own grace period (or `grace_s`, if that is shorter) and wait for it."""
        self._stopping = True
        for life in self._lives.values():
            life.shut_down(grace_s)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for repeated in self._repeated:
            repeated.cancel()
        self.node.objects.listeners.remove(self._on_change)

    @property
    def running(self) -> int:
        """The number of pods whose life has not ended."""
        return len(self._tasks)

    def _on_change(self, record: Record) -> None:
        kind = record.object["kind"]
        if kind == "Pod":
            self._pod_changed(record)
        elif kind in ("ConfigMap", "Secret", "PersistentVolumeClaim"):
            if kind == "PersistentVolumeClaim" and record.type == "ADDED":
                self._bind(record.object)
            key = key_of(record.object)
            for life in list(self._lives.values()):
                if key in life.sources:
                    life.source_changed(key)

    def _pod_changed(self, record: Record) -> None:
        uid = record.object["metadata"]["uid"]
        if record.type == "DELETED":
            shutil.rmtree(self.node.folders.pod(record.object), ignore_errors=True)
        if uid in self._lives:
            self._lives[uid].poke()
        elif record.type == "ADDED":
            self._begin_life(record.object)

    def _begin_life(self, pod: Object) -> None:
        if self._stopping:
            return
        uid = pod["metadata"]["uid"]
        life = PodLife(pod, self.node, self._wake_all)
        lost = (pod.get("status") or {}).get("phase") == "Running"
        if lost:
            life.mark_lost()
        self._lives[uid] = life
        self._tasks[uid] = asyncio.get_running_loop().create_task(self._live(life, lost=lost))

    async def _live(self, life: PodLife, *, lost: bool) -> None:
        try:
            await (life.conclude() if lost else life.run())
        except Exception as error:
            log.exception("pod %s/%s: the embedded cluster failed", life.ref.namespace, life.ref.name)
            life.mark_broken(error)
            await life.conclude()
        finally:
            self._lives.pop(life.ref.uid, None)
            self._tasks.pop(life.ref.uid, None)

    def _wake_all(self) -> None:
        """Wake every pod: one may wait for the GPUs that came back."""
        for life in self._lives.values():
            life.poke()

    def _bind(self, claim: Object) -> None:
        if (claim.get("status") or {}).get("phase") == "Bound":
            return
        spec = claim.get("spec") or {}
        capacity = (spec.get("resources") or {}).get("requests") or {}
        status = {"phase": "Bound", "accessModes": spec.get("accessModes") or ["ReadWriteMany"], "capacity": capacity}
        ref = Ref(*key_of(claim), claim["metadata"]["uid"])
        self._store(lambda: self.node.objects.update_status(ref, status))

    def _store(self, write: Callable[[], object]) -> None:
        """Write now, or as soon as the state folder can be written."""
        if not try_store(write):
            repeated = until_stored(write, self.node.clock, give_up=lambda: self._stopping)
            task = asyncio.get_running_loop().create_task(repeated)
            self._repeated.add(task)
            task.add_done_callback(self._repeated.discard)

    def _remove_leftovers(self) -> None:
        """Delete the folders of pods that were deleted while no supervisor ran."""
        known = {self.node.folders.pod(pod).name for pod in self.node.objects.of_kind("Pod")}
        parent = self.node.folders.root / "pods"
        for folder in parent.iterdir() if parent.exists() else ():
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)


def _has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
