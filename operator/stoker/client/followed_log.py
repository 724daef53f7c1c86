"""A followed log of a job: what is asked for after a cut, and which of the lines were shown. Pure but for the clock.

The gateway keeps nothing of a stream. A client that was cut off asks for the lines from the time up to which it read
the log of each pod, and passes over those that it had.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from stoker.client.errors import NoAnswer, StokerError, error_of_problem
from stoker.client.event_stream import Event
from stoker.client.reopened_stream import ReopenedStream
from stoker.gateway.problem import ProblemDocument
from stoker.pod.log_position import LogPosition, LogRequest


class FollowedLog:
    """The lines of all ranks of a job, by one stream after the other."""

    def __init__(self, tail_lines: int | None) -> None:
        self.ended = False
        self._asked, self._stream = LogRequest(tail=tail_lines), ReopenedStream()
        self._began = ""
        """When the first stream began, by the gateway's clock."""
        self._positions: dict[str, LogPosition] = {}
        self._attempts: dict[str, int] = {}

    def query(self) -> dict[str, str]:
        """Return what the next stream asks for."""
        if not self._began:
            return {} if self._asked.tail is None else {"tail_lines": str(self._asked.tail)}
        if not self._attempts:
            return {"since_time": self._began} if self._asked.tail == 0 else {}
        first = max(max(self._attempts.values()) - 1, min(self._attempts.values()))
        since = [self._since(pod) for pod, attempt in self._attempts.items() if attempt >= first]
        return {"from_attempt": str(first), **({"since_time": min(since)} if all(since) else {})}

    def begin(self, date: str) -> None:
        """Note that a stream begins.

        Args:
            date: the header `Date` of its answer.
        """
        self._stream.heard()
        self._began = self._began or _noted(date)
        for position in self._positions.values():
            position.opened()

    def take(self, event: Event) -> str | None:
        """Return the line of an event, if it is one that was not shown. Raises StokerError for an error."""
        if event.name == "ERROR":
            self.ended = True  # the gateway has asked again for minutes
            raise error_of_problem(ProblemDocument.model_validate(event.data))
        self.ended = self.ended or event.name == "END"
        if event.name == "POD":
            self._attempts[event.data["pod"]] = event.data["attempt"]
        return self._line(**event.data) if event.name == "LINE" else None

    def lost(self, error: NoAnswer | StokerError) -> None:
        """Note that a stream was cut. Raises `error` where no other stream can go on, or none begins for minutes."""
        if self.ended or not all(position.can_go_on for position in self._positions.values()):
            raise error
        self._stream.lost(error)

    def _line(self, pod: str, time: str | None, text: str) -> str | None:
        if pod not in self._positions:
            self._positions[pod] = LogPosition(self._asked)
            self._positions[pod].opened()
        if not self._positions[pod].new_lines([f"{time} {text}" if time else text]):
            return None
        several = max(Counter(self._attempts.values()).values(), default=1) > 1
        return f"[{pod}] {text}" if several else text

    def _since(self, pod: str) -> str:
        """The time from which the log of a pod is read again; empty for all of it."""
        position = self._positions.get(pod)
        if position is not None:
            return position.since_time
        return self._began if self._asked.tail == 0 else ""


def _noted(date: str) -> str:
    """The time of a header `Date`, a second earlier: of a pod without a line, what came after it is new."""
    at = parsedate_to_datetime(date) if date else datetime.now(UTC)
    return f"{at.astimezone(UTC) - timedelta(seconds=1):%Y-%m-%dT%H:%M:%SZ}"
