"""The pods of a job by attempt: their order, and those that a log is read of. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
ATTEMPT = "stoker.dev/attempt"
NODE_RANK = "stoker.dev/node-rank"


@dataclass(frozen=True)
class Attempts:
    """The attempts that are asked for; without any the newest that has pods."""

    only: int | None = None
    first: int | None = None
    """This one and all that come after it."""

    def chosen(self, pods: Collection[Object]) -> list[Object]:
        """Choose pods of these attempts."""
        if self.only is not None:
            return [pod for pod in pods if attempt_of(pod) == self.only]
        newest = max(map(attempt_of, pods), default=0)
        first = newest if self.first is None else self.first
        return [pod for pod in pods if attempt_of(pod) >= first]


def in_order(pods: Iterable[Object]) -> list[Object]:
    """Sort pods by attempt and rank."""
    return sorted(pods, key=lambda pod: (attempt_of(pod), rank_of(pod), pod["metadata"]["name"]))


def attempt_of(pod: Mapping[str, Any]) -> int:
    return _label(pod, ATTEMPT)


def rank_of(pod: Mapping[str, Any]) -> int:
    """The node rank of a pod within its attempt."""
    return _label(pod, NODE_RANK)


def _label(pod: Mapping[str, Any], name: str) -> int:
    text = str((pod["metadata"].get("labels") or {}).get(name) or "0")
    return int(text) if text.isdigit() else 0
