"""The status of one pod in the object store: written at each change, and repeated until the state folder has it.

The only writer of that status. Owned by `PodLife`, which passes a new `PodView` at each change.
"""

from __future__ import annotations

import asyncio
import logging

from stoker.operator.cluster.local.node import Node
from stoker.operator.cluster.local.pod_status import PodView, render_status
from stoker.operator.cluster.local.stored_write import try_store, until_stored
from stoker.operator.domain.plan import Key, Object, Ref

log = logging.getLogger(__name__)


class PodStatusWriter:
    """The only writer of this pod's status. `view` is the newest; the object is behind it while a write fails."""

    def __init__(self, ref: Ref, node: Node, view: PodView) -> None:
        self.ref = ref
        self.node = node
        self.view = view
        self._retry: asyncio.Task[bool] | None = None

    def pod(self) -> Object | None:
        """The object now; None when it is gone, or another one has its name."""
        found = self.node.objects.find(Key(*self.ref[:3]))
        return found if found is not None and found["metadata"]["uid"] == self.ref.uid else None

    def write(self, view: PodView) -> None:
        """Take over a new view, and write it now or as soon as the state folder can be written."""
        self.view = view
        if self.behind or try_store(self._write):
            return
        retry = until_stored(self._write, self.node.clock, give_up=lambda: False)
        self._retry = asyncio.get_running_loop().create_task(retry)

    @property
    def behind(self) -> bool:
        """Whether a write is being repeated."""
        return self._retry is not None and not self._retry.done()

    async def wait_until_written(self) -> None:
        """Wait until the object has the newest view."""
        if self._retry is not None:
            await asyncio.wait([self._retry])

    def give_up(self) -> None:
        """Write once more, then stop trying: the next supervisor finds the pod as it was last written."""
        if self._retry is not None and self.behind:
            self._retry.cancel()
            if not try_store(self._write):
                log.error("pod %s/%s: its last status could not be written", self.ref.namespace, self.ref.name)

    def _write(self) -> None:
        pod = self.pod()
        if pod is not None:
            status = render_status(self.view, pod.get("status") or {}, self.node.now())
            self.node.objects.update_status(self.ref, status)
