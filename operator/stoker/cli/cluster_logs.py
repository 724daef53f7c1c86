"""The logs of an object's pods as `FollowedLogs` reads them: by an API server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from stoker.cli.outage import is_outage
from stoker.operator.cluster.interface import ClusterError, Invalid, NotFound
from stoker.pod.log_position import LogRequest
from stoker.pod.log_source import Look, Meaning, Pod
from stoker.pod.whole_lines import line_batches_of

Choose = Callable[[list[Pod], Pod | None], Look]
SILENCE_S = 120.0
"""Time after which a silent stream is opened again: its connection may be lost without a word."""


class ClusterLogs:
    """The pods of one object.

    Args:
        find: reads all pods of the object's namespace, and the object; None where it is gone.
        open_log: opens the followed log of a pod.
        choose: decides which of the pods are read.
        explain: an error in words for people.
    """

    def __init__(
        self,
        find: Callable[[], Any],
        open_log: Callable[[Pod, LogRequest], AsyncIterator[bytes]],
        choose: Choose,
        explain: Callable[[ClusterError], str],
    ) -> None:
        self.errors: tuple[type[Exception], ...] = (ClusterError,)
        self._find, self._open_log, self._choose, self._explain = find, open_log, choose, explain

    async def look(self) -> Look:
        return self._choose(*await self._find())

    def read(self, pod: Pod, request: LogRequest) -> AsyncIterator[list[str]]:
        return line_batches_of(self._open_log(pod, request))

    def meaning(self, error: Exception) -> Meaning:
        if isinstance(error, Invalid | NotFound):
            return Meaning.NO_LOG
        assert isinstance(error, ClusterError)
        return Meaning.NO_ANSWER if is_outage(error) else Meaning.REFUSED

    def explain(self, error: Exception) -> str:
        assert isinstance(error, ClusterError)
        return self._explain(error)
