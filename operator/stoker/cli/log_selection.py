"""Which pods' logs are printed, and which of their lines. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.operator.domain.labels import ATTEMPT
from stoker.pod.log_position import LogRequest

Pod = Mapping[str, Any]
_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


class NoSuchLog(ValueError):
    """There is no such rank, or no pod is left of the attempt that is asked for; the message names what there is."""


@dataclass(frozen=True)
class LogSelection:
    """What `logs` was asked for."""

    follow: bool = False
    tail: int | None = None
    """Last lines of each pod; those of the rank, if one is given."""
    since_s: int | None = None
    rank: int | None = None
    """Only lines that this rank of a job wrote."""
    attempt: int | None = None
    """Pods of this attempt of a job; None: the newest, and with `follow` those that come after it."""
    previous: bool = False
    """Pods of the attempt before the newest."""

    def pods_of(self, pods: Sequence[Pod]) -> list[Pod]:
        """Choose pods by their attempt. Pods without one (engines, routers, tasks) are all chosen.

        Raises:
            NoSuchLog.
        """
        attempts = sorted({number for pod in pods if (number := attempt_of(pod)) is not None})
        if not attempts:
            if self.attempt is not None or self.previous:
                raise NoSuchLog("--attempt and --previous are for the pods of a job, and there is none")
            return list(pods)
        if self.previous and len(attempts) < 2:
            raise NoSuchLog(f"no pod of an earlier attempt is left, only of attempt {attempts[-1]}")
        wanted = attempts[-2] if self.previous else attempts[-1] if self.attempt is None else self.attempt
        if wanted not in attempts:
            raise NoSuchLog(f"no pod of attempt {wanted} is left; there are those of {', '.join(map(str, attempts))}")
        return [pod for pod in pods if attempt_of(pod) in (None, wanted)]

    def check_rank(self, owner: Mapping[str, Any]) -> None:
        """Refuse a rank that a job does not have. Raises NoSuchLog."""
        size = (owner.get("status") or {}).get("worldSize")
        if self.rank is not None and size is not None and self.rank >= size:
            raise NoSuchLog(f"--rank {self.rank}: the job has ranks 0 to {size - 1}")

    def has(self, text: str) -> bool:
        """Whether a line is of the chosen rank."""
        return self.rank is None or text.startswith(f"[rank {self.rank}] ")

    def lines_of(self, lines: Iterable[str]) -> Iterable[str]:
        """Choose lines of one pod."""
        return filter(self.has, lines)

    def last_of(self, lines: Iterable[str]) -> Iterable[str]:
        """Choose lines of the whole log of one pod."""
        own = self.lines_of(lines)
        return own if self.tail is None else deque(own, maxlen=self.tail)

    @property
    def counts_here(self) -> bool:
        """Whether the tail is counted here: the cluster counts the lines of all ranks."""
        return self.rank is not None and self.tail is not None

    @property
    def request(self) -> LogRequest:
        """What the cluster is asked for."""
        return LogRequest(tail=None if self.counts_here else self.tail, since_s=self.since_s)


def attempt_of(pod: Pod) -> int | None:
    """The attempt that a pod belongs to."""
    text = str((pod["metadata"].get("labels") or {}).get(ATTEMPT, ""))
    return int(text) if text.isdigit() else None


def parse_duration_s(text: str) -> int:
    """Parse `90s`, `5m`, `1h30m` into seconds.

    Raises:
        ValueError.
    """
    found = _DURATION.fullmatch(text)
    hours, minutes, seconds = (int(part or 0) for part in found.groups()) if found else (0, 0, 0)
    total = hours * 3600 + minutes * 60 + seconds
    if not total:
        raise ValueError(f"{text!r} is no time such as 90s, 5m or 1h30m")
    return total


def has_ended(owner: Mapping[str, Any]) -> bool:
    """Whether an object gets no more pods by itself: an ended or suspended job, a checkpoint that is done, a pod."""
    return str((owner.get("status") or {}).get("phase")) in _ENDED.get(owner["kind"], ())


_ENDED = {
    "TrainingJob": ("Completed", "Failed", "Cancelled", "Suspended"),
    "Checkpoint": ("Complete", "Corrupt", "Failed", "Deleted"),
    "Pod": ("Succeeded", "Failed"),
}
