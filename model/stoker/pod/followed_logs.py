"""The logs of an object's pods as they come; also those of later pods, of the next attempt or of a new replica.

A stream that is cut (a restarted API server or kubelet, a proxy that ends long answers) is opened again where it ended.
Knows no cluster: a `LogSource` reads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from stoker.pod.log_position import LogPosition, LogRequest
from stoker.pod.log_reading import LogReading, PodLines
from stoker.pod.log_source import LogSource, Look, Meaning
from stoker.pod.patience import LONGEST_S, Patience

LOOK_S = 1.0


class FollowedLogs:
    """Reads the log of each pod once, from the moment it has one.

    Args:
        asked: what is asked for of the pods that are there at first. Of later ones everything is read.
        say: called when nothing answers, and when that is over.
    """

    def __init__(
        self,
        source: LogSource,
        asked: LogRequest,
        say: Callable[[str], None],
        *,
        every_s: float = LOOK_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.source, self.asked, self.say, self.every_s, self._monotonic = source, asked, say, every_s, monotonic
        self.several = False
        """Whether two pods were seen at one moment, so that lines need the name of theirs."""
        self._looked = False
        self._patience = Patience(monotonic=monotonic)
        self._queue: asyncio.Queue[PodLines | None] = asyncio.Queue(maxsize=100)
        self._readings: dict[str, LogReading] = {}

    async def lines(self) -> AsyncGenerator[PodLines, None]:
        """Yield (pod, whole lines) until the object has ended and so has every log; first no lines of each pod.

        Raises what the source raised: a refusal, or an error of more than five minutes without an answer.
        """
        watcher = asyncio.create_task(self._discover())
        try:
            while (found := await self._queue.get()) is not None:
                yield found
            await watcher
        finally:
            tasks = [watcher, *(reading.task for reading in self._readings.values() if reading.task)]
            for task in tasks:
                task.cancel()
            while not self._queue.empty():
                self._queue.get_nowait()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _discover(self) -> None:
        """Begin to read pods that are new, had no log yet or were cut off; end the stream after the last one."""
        try:
            while True:
                if await self._follow_once():
                    return
                await asyncio.sleep(self.every_s)
        finally:
            await self._queue.put(None)

    async def _follow_once(self) -> bool:
        """Look once; True when every log has ended and no other comes."""
        for reading in self._readings.values():
            reading.raise_error()
        look = await self._look()
        if look is None:
            return False
        self.several = self.several or len(look.chosen) > 1
        there = {pod["metadata"]["uid"]: pod for pod in look.pods}
        for uid, pod in there.items():
            if uid in look.chosen and uid not in self._readings:
                await self._begin(uid, pod["metadata"]["name"])
        self._looked = True
        for uid, reading in self._readings.items():
            reading.go_on(there.get(uid))
        if not look.ended or not all(reading.will_end for reading in self._readings.values()):
            return False
        await asyncio.gather(*(reading.task for reading in self._readings.values() if reading.task))
        return all(reading.ended for reading in self._readings.values())

    async def _look(self) -> Look | None:
        try:
            found = await self.source.look()
        except self.source.errors as error:
            if self.source.meaning(error) is not Meaning.NO_ANSWER:
                raise
            if self._patience.missed(error):
                self.say(f"{self.source.explain(error)}; asking again for {LONGEST_S / 60:g} minutes")
            return None
        if self._patience.heard():
            self.say("the cluster answers again")
        return found

    async def _begin(self, uid: str, name: str) -> None:
        asked = LogRequest() if self._looked else self.asked
        position, patience = LogPosition(asked, monotonic=self._monotonic), Patience(monotonic=self._monotonic)
        self._readings[uid] = LogReading(name, self.source, position, patience, self._queue.put, self.say)
        await self._queue.put((name, []))
