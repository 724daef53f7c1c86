"""A namespace in which a story is told, the same on every kind of cluster: commands, addresses, waits."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import httpx

from testing.stories.load import Load
from testing.stories.waits import TIMEOUT_S, Waits


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

    def ready_url(self, service: str) -> str:
        """Return the address of a deployment once its router has a ready engine: a moment after `Serving`."""
        url = self.url(service)
        self.wait_until(lambda: _can_answer(url), f"an engine ready behind {service}")
        return url

    def more_answers(self, load: Load, count: int) -> None:
        """Wait until a load has so many answers more, or has failed."""
        wanted = len(load.answers) + count
        self.wait_until(lambda: load.failures or len(load.answers) >= wanted, f"{count} more answers")


def _can_answer(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200
    except httpx.TransportError:
        return False  # the router does not listen yet
