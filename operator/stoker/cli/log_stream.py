"""The logs of an object's pods as they come; also those of later pods, of the next attempt or of a new replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from stoker.operator.cluster.interface import Invalid, NotFound
from stoker.pod.whole_lines import WholeLines

LOOK_S = 1.0
Pod = dict[str, Any]


class Look(NamedTuple):
    """The pods of an object at one moment."""

    pods: Sequence[Pod]
    ended: bool
    """Whether no later pods come."""


class LogStream:
    """Reads the log of each pod once, from the moment it has one.

    Args:
        read: opens the log of a pod. Raises Invalid while its container has not started, NotFound when it is gone.
        look: finds the pods.
    """

    def __init__(
        self,
        read: Callable[[Pod], AsyncIterator[bytes]],
        look: Callable[[], Awaitable[Look]],
        every_s: float = LOOK_S,
    ) -> None:
        self.read, self.look, self.every_s = read, look, every_s
        self.several = False
        """Whether two pods were seen at one moment, so that lines need the name of theirs."""
        self._queue: asyncio.Queue[tuple[str, list[str]] | None] = asyncio.Queue(maxsize=100)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def lines(self) -> AsyncGenerator[tuple[str, list[str]], None]:
        """Yield (pod, whole lines) until the object has ended and so has every log. Raises what a call raised."""
        watcher = asyncio.create_task(self._discover())
        try:
            while (found := await self._queue.get()) is not None:
                yield found
            await watcher
        finally:
            for task in (watcher, *self._tasks.values()):
                task.cancel()
            while not self._queue.empty():
                self._queue.get_nowait()
            await asyncio.gather(watcher, *self._tasks.values(), return_exceptions=True)

    async def _discover(self) -> None:
        """Start to read pods that are new, or that had no log yet; end the stream after the last one."""
        try:
            while True:
                look = await self.look()
                self.several = self.several or len(look.pods) > 1
                for pod in look.pods:
                    self._start(pod)
                if look.ended:
                    await asyncio.gather(*self._tasks.values())
                    return
                await asyncio.sleep(self.every_s)
                self._raise_first()
        finally:
            await self._queue.put(None)

    def _start(self, pod: Pod) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self._tasks:
            self._tasks[uid] = asyncio.create_task(self._pump(uid, pod))

    def _raise_first(self) -> None:
        for task in self._tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    async def _pump(self, uid: str, pod: Pod) -> None:
        name, cutter = str(pod["metadata"]["name"]), WholeLines()
        try:
            async for part in self.read(pod):
                if lines := cutter.cut(part):
                    await self._queue.put((name, lines))
        except Invalid:
            self._tasks.pop(uid, None)  # not started: the next look begins again
        except NotFound:
            return
        if last := cutter.last():
            await self._queue.put((name, last))
