"""The reading of one pod's log: a stream that is cut is followed by another one, which goes on where it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from stoker.pod.log_position import LogPosition, TimedLine
from stoker.pod.log_source import LogSource, Meaning, Pod
from stoker.pod.patience import Patience

ENDED = ("Succeeded", "Failed")
PodLines = tuple[str, list[TimedLine]]


class LogReading:
    """The reading of one pod's log, by one stream after the other."""

    def __init__(
        self,
        name: str,
        source: LogSource,
        position: LogPosition,
        patience: Patience,
        put: Callable[[PodLines], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        self.name, self.source, self.put, self.say = name, source, put, say
        self._position, self._patience = position, patience
        self.ended = False
        self.will_end = False
        """Whether the stream of now is the last: it began after the pod had ended."""
        self._closed = False
        """Whether the last stream ended without an error."""
        self.task: asyncio.Task[None] | None = None
        self._num_missed = 0
        """Streams in a row that did not begin, with the one that was cut before them."""

    def go_on(self, pod: Pod | None) -> None:
        """Open a stream, unless one is open or the log has ended. None: the pod is gone."""
        if self.ended or (self.task is not None and not self.task.done()):
            return
        over = pod is None or (pod.get("status") or {}).get("phase") in ENDED
        if pod is None or (over and self._closed and not self._position.is_exact):
            self.ended = self.will_end = True
            return
        if self._closed and not self._position.can_go_on:
            return  # until the end of the pod is seen
        self.will_end = over
        self.task = asyncio.create_task(self._read(pod), name=f"log of {self.name}")

    def raise_error(self) -> None:
        """Raise what ended the reading, if an error did."""
        if self.task is not None and self.task.done() and not self.task.cancelled():
            self.task.result()

    async def _read(self, pod: Pod) -> None:
        try:
            self._closed = False
            await self._pass_on(pod)
            self.ended, self._closed = self.will_end, True
        except self.source.errors as error:
            self._judge(error)
        self.will_end = self.will_end or self.ended

    async def _pass_on(self, pod: Pod) -> None:
        """Read one stream to its end."""
        begun = False
        async for lines in self.source.read(pod, self._position.request()):
            if not begun:
                begun, self._num_missed = True, 0
                self._position.opened()
                self._patience.heard()
            if new := self._position.new_lines(lines):
                await self.put((self.name, new))

    def _judge(self, error: Exception) -> None:
        """Decide whether another stream is opened after an error. Raises it where none can be."""
        meaning = self.source.meaning(error)
        if meaning is Meaning.REFUSED or (meaning is Meaning.NO_ANSWER and not self._position.can_go_on):
            raise error
        if meaning is Meaning.NO_ANSWER:
            self._miss(error)
        else:
            self._position.missing()
            self.ended = self.will_end  # else the next look tells whether the pod is gone

    def _miss(self, error: Exception) -> None:
        """Note that nothing answered. Raises `error` where that lasts too long after the pod's end.

        Nothing is said of the first time: a stream that is cut is opened again at the next look. A pod that runs is
        asked as long as it is there, so that one lost node ends no log of others.
        """
        self._num_missed += 1
        if self.will_end:
            self._patience.missed(error)
        if self._num_missed == 2:
            self.say(f"log of pod {self.name}: {self.source.explain(error)}; asking again")
