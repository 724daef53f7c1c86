"""The streams of a device in which offloaded state arrives, is updated and leaves, and the events between them.

On a CPU everything happens at once. `offload` states the order; tests run it in every order that the events allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor


class Queues(Protocol):
    """Three streams of one device. An event is what `mark` returns; None is one that has happened."""

    arriving: Any
    updates: Any
    leaving: Any

    def inside(self, stream: Any) -> AbstractContextManager[object]:
        """What is queued inside runs in this stream."""
        ...

    def update_after_current(self, scale: Tensor) -> AbstractContextManager[object]:
        """What is queued inside runs in `updates`, after all that is in the stream which is current before."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy in the current stream."""
        ...

    def mark(self) -> Any:
        """Return the event of all that is queued in the current stream."""
        ...

    def wait(self, event: Any) -> None:
        """Let what is queued in the current stream from now on wait for an event."""
        ...


class HostQueues:
    """One thing after another."""

    arriving = updates = leaving = None

    def inside(self, stream: Any) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def update_after_current(self, scale: Tensor) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Any:
        return None

    def wait(self, event: Any) -> None:
        """Everything has happened."""


class CudaQueues:
    """Streams of a GPU. Copies from and to page-locked memory use the engines of their direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.arriving, self.updates, self.leaving = (torch.cuda.Stream(device) for _ in range(3))  # type: ignore[no-untyped-call]

    def inside(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    @contextmanager
    def update_after_current(self, scale: Tensor) -> Iterator[None]:
        self.updates.wait_stream(torch.cuda.current_stream(self._device))
        scale.record_stream(self.updates)
        with torch.cuda.stream(self.updates):
            yield

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event()

    def wait(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def queues_of(device: torch.device) -> Queues:
    """Make the streams of a device."""
    return CudaQueues(device) if device.type == "cuda" else HostQueues()
