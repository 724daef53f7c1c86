"""A cluster as logs are followed in it: which pods an object has, the log of one, and what an error says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from stoker.pod.log_position import LogRequest

Pod = dict[str, Any]


class Look(NamedTuple):
    """The pods of an object at one moment."""

    pods: Sequence[Pod]
    chosen: Collection[str]
    """Uids of those whose logs are read. One that was chosen once is read to its end."""
    ended: bool
    """Whether no later pods come."""


class Meaning(Enum):
    """What an error says about a log."""

    NO_LOG = "no log"
    """The container has not started, or its kubelet does not know the pod: it is gone, or the kubelet is restarted."""
    NO_ANSWER = "no answer"
    """Nothing answered, or the stream was cut."""
    REFUSED = "refused"


class LogSource(Protocol):
    """A cluster as logs are followed in it."""

    errors: tuple[type[Exception], ...]
    """What `look` and `read` raise."""

    async def look(self) -> Look:
        """Find the pods."""

    def read(self, pod: Pod, request: LogRequest) -> AsyncIterator[Sequence[str]]:
        """Yield whole lines as they come, and first an empty list when the stream begins."""

    def meaning(self, error: Exception) -> Meaning:
        """What an error of the other two says."""

    def explain(self, error: Exception) -> str:
        """The error in words for people."""
