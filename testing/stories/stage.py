"""A namespace in which a story is told, the same on every kind of cluster: commands, addresses, waits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from testing.stories.load import Load
from testing.stories.waits import Waits


class Stage(Waits):
    """What a story does that is told on the embedded cluster and on real nodes."""

    @abstractmethod
    def apply(self, *objects: Mapping[str, Any]) -> object:
        """Apply manifests; a refusal fails the story."""

    @abstractmethod
    def delete(self, kind: str, name: str) -> object:
        """Delete an object."""

    @abstractmethod
    def url(self, service: str) -> str:
        """Return the address of a Service, which this machine reaches as a pod does."""

    def more_answers(self, load: Load, count: int) -> None:
        """Wait until a load has so many answers more, or has failed."""
        wanted = len(load.answers) + count
        self.wait_until(lambda: load.failures or len(load.answers) >= wanted, f"{count} more answers")
