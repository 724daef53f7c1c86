"""One of several data ranks of an engine: a choice of its own, with its queue and its prefix cache.

The router names it in a header. Health, connections and the rest are those of the pod. Made and kept up to date by
`Backend`, by the reports of its engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, Protocol, TypeVar

from stoker.router.counted_place import CountedPlace
from stoker.router.load import Load
from stoker.router.snapshot import BackendEntry, Role


class RankedPod(Protocol):
    """The part of a backend that its data ranks use."""

    role: Role
    clock: Callable[[], float]
    entry: BackendEntry

    @property
    def revision(self) -> str:
        """The revision that it serves."""
        ...

    @property
    def silent(self) -> bool:
        """Whether its engine has not reported for long."""
        ...

    def request(self) -> AbstractContextManager[None]:
        """Count one request as pending."""
        ...

    def reached(self, load: Load | None) -> str | None:
        """The endpoint in a report, with the pod's own address in place of any host."""
        ...


P = TypeVar("P", bound=RankedPod)


class DataRank(CountedPlace, Generic[P]):
    """A core of an engine, with the whole model."""

    def __init__(self, backend: P, rank: int) -> None:
        super().__init__(backend.role, backend.clock)
        self.backend = backend
        """The pod that gets its requests."""
        self.rank = rank
        """Its number in the pod."""
        self.identity = backend.entry.pod_uid, ""
        """As a backend's: after a restart its cache is empty."""

    def take(self, load: Load) -> None:
        """Take its part of a newer report."""
        self.identity = self.backend.entry.pod_uid, f"{load.epoch}/{self.rank}"
        super().take(load)

    @property
    def revision(self) -> str:
        """The revision that it serves."""
        return self.backend.revision

    @property
    def silent(self) -> bool:
        """Whether its engine has not reported for long."""
        return self.backend.silent

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count one request as pending, at the pod as well."""
        with self.backend.request(), super().request():
            yield

    @contextmanager
    def helping(self, tokens: int) -> Iterator[str | None]:
        """Count a prompt that it computes for another engine, as `Backend.helping`."""
        with self.computing(tokens):
            yield self.backend.reached(self.load)
