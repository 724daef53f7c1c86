"""Runs the pods of the object store on this machine: one task per pod, woken by changes of what it waits for."""

from __future__ import annotations

import asyncio
import logging
import shutil

from stoker.operator.cluster.local.objects import Record
from stoker.operator.cluster.local.pod_life import Node, PodLife
from stoker.operator.domain.plan import Object, Ref
from stoker.operator.loop.store import key_of

log = logging.getLogger(__name__)


class Kubelet:
    """Started once, within a running event loop."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._lives: dict[str, PodLife] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    def start(self) -> None:
        """Take up every pod that is there; those that ran when the last supervisor ended are lost."""
        self.node.objects.listeners.append(self._on_change)
        for claim in self.node.objects.of_kind("PersistentVolumeClaim"):
            self._bind(claim)
        for pod in self.node.objects.of_kind("Pod"):
            if not _has_ended(pod):
                self._take_up(pod)
        self._remove_leftovers()

    async def stop(self, grace_s: float | None = None) -> None:
        """End every pod within its own grace period (or `grace_s`, if that is shorter) and wait for it."""
        self._stopping = True
        for life in self._lives.values():
            life.shut_down(grace_s)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self.node.objects.listeners.remove(self._on_change)

    @property
    def running(self) -> int:
        """Pods that are not through."""
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
            self._take_up(record.object)

    def _take_up(self, pod: Object) -> None:
        if self._stopping:
            return
        uid = pod["metadata"]["uid"]
        life = PodLife(pod, self.node, self._poke_all)
        if (pod.get("status") or {}).get("phase") == "Running":
            life.mark_lost()
            if pod["metadata"].get("deletionTimestamp"):
                self.node.objects.delete(life.ref, grace_s=0)
            return
        self._lives[uid] = life
        task = asyncio.get_running_loop().create_task(self._live(life))
        self._tasks[uid] = task

    async def _live(self, life: PodLife) -> None:
        try:
            await life.run()
        except Exception:
            log.exception("pod %s/%s: the embedded cluster failed", life.ref.namespace, life.ref.name)
        finally:
            self._lives.pop(life.ref.uid, None)
            self._tasks.pop(life.ref.uid, None)

    def _poke_all(self) -> None:
        """GPUs came back: somebody may be waiting for them."""
        for life in self._lives.values():
            life.poke()

    def _bind(self, claim: Object) -> None:
        if (claim.get("status") or {}).get("phase") == "Bound":
            return
        spec = claim.get("spec") or {}
        capacity = (spec.get("resources") or {}).get("requests") or {}
        status = {"phase": "Bound", "accessModes": spec.get("accessModes") or ["ReadWriteMany"], "capacity": capacity}
        self.node.objects.update_status(Ref(*key_of(claim), claim["metadata"]["uid"]), status)

    def _remove_leftovers(self) -> None:
        """Folders of pods that were deleted while no supervisor ran."""
        known = {self.node.folders.pod(pod).name for pod in self.node.objects.of_kind("Pod")}
        parent = self.node.folders.root / "pods"
        for folder in parent.iterdir() if parent.exists() else ():
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)


def _has_ended(pod: Object) -> bool:
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
