"""Queries of a story about objects, the same for every kind of cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Object = dict[str, Any]
FIGURES = ("step", "tokens", "loss", "learningRate", "elapsedSeconds", "layout", "bytes", "files", "pieces")
"""Numbers of a save in the status of a Checkpoint."""


class ObjectViews(ABC):
    """Views of one namespace that follow from `all` and `find`."""

    @abstractmethod
    def all(self, kind: str, **labels: str) -> list[Object]:
        """Return the objects of a kind by labels below `stoker.dev/` (underscores for dashes), sorted by name."""

    @abstractmethod
    def find(self, kind: str, name: str) -> Object | None:
        """Return one object, or None."""

    def get(self, kind: str, name: str) -> Object:
        found = self.find(kind, name)
        assert found is not None, f"{kind} {name} does not exist"
        return found

    def status(self, kind: str, name: str) -> Object:
        status: Object = self.get(kind, name).get("status") or {}
        return status

    def figures(self, checkpoint: str) -> Object:
        """Return the figures of a save, by the names of `FIGURES`."""
        return {name: value for name, value in self.status("Checkpoint", checkpoint).items() if name in FIGURES}

    def condition(self, kind: str, name: str, type_: str) -> Object:
        """Return one condition; empty when it is absent."""
        conditions = self.status(kind, name).get("conditions") or ()
        return next((dict(found) for found in conditions if found["type"] == type_), {})

    def events(self, kind: str, name: str) -> dict[str, list[str]]:
        """Return messages by reason of the events about an object."""
        found: dict[str, list[str]] = {}
        for event in self.all("Event"):
            about = event["involvedObject"]
            if (about["kind"], about["name"]) == (kind, name):
                found.setdefault(event["reason"], []).append(event["message"])
        return found

    def pods(self, **labels: str) -> list[Object]:
        return self.all("Pod", **labels)
