"""The last lines of one rank, and those that follow: a cluster counts the lines of all ranks of a pod alike."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from stoker.cli.log_selection import LogSelection
from stoker.pod.log_position import LogPosition, LogRequest, timed
from stoker.pod.log_source import LogSource, Look, Meaning, Pod
from stoker.pod.whole_lines import WholeLines


class RankTail:
    """Reads what is there of a log, and shows the last lines of the rank before it follows.

    Args:
        source: the logs as they come.
        read_now: reads what is there of a log, with times.
    """

    def __init__(
        self, source: LogSource, read_now: Callable[[Pod, LogRequest], Awaitable[bytes]], selection: LogSelection
    ) -> None:
        self.errors = source.errors
        self._source, self._read_now, self._selection = source, read_now, selection

    async def look(self) -> Look:
        return await self._source.look()

    async def read(self, pod: Pod, request: LogRequest) -> AsyncIterator[Sequence[str]]:
        """A request without a tail goes on behind lines that were shown."""
        if request.tail is not None:
            position = LogPosition(request._replace(tail=None))
            there = await self._read_now(pod, position.request())
            position.opened()
            yield []
            yield self._last(position, there)
            following = self._source.read(pod, position.request())
            yield await anext(following, [])
            position.opened()
            async for lines in following:
                yield [line for line in lines if position.new_lines([line])]
            return
        async for lines in self._source.read(pod, request):
            yield lines

    def _last(self, position: LogPosition, log: bytes) -> list[str]:
        cutter = WholeLines()
        lines = [*cutter.cut(log), *cutter.last()]
        position.new_lines(lines)
        return list(deque((line for line in lines if self._selection.has(timed(line).text)), self._selection.tail))

    def meaning(self, error: Exception) -> Meaning:
        return self._source.meaning(error)

    def explain(self, error: Exception) -> str:
        return self._source.explain(error)
