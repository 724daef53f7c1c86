"""Streams of a device as queues in which work waits, and runs in any order that the events between them allow."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from stoker.model.kernels.ops import Ops
from stoker.trainer.protocol.config import OptimizationConfig
from stoker.trainer.rank.bucket import LINE
from stoker.trainer.rank.lamb import Lamb, clip_span, tensor_spans
from stoker.trainer.rank.optimizer import Adam, HeldState, UpdateNumbers

LIMIT_S = 120.0


@dataclass(eq=False)
class Event:
    happened: bool = False

    def happen(self) -> None:
        self.happened = True

    def synchronize(self) -> None:
        """Block the caller, as an event of CUDA does; the queues must run in another thread."""
        deadline = time.monotonic() + LIMIT_S
        while not self.happened:
            assert time.monotonic() < deadline, "the event never happens"
            time.sleep(0.001)


@dataclass(eq=False)
class Stream:
    waiting: deque[Event | Callable[[], object]] = field(default_factory=deque)

    @property
    def can_run(self) -> bool:
        head = self.waiting[0] if self.waiting else None
        return head is not None and (not isinstance(head, Event) or head.happened)


class AnyOrder:
    """Queues whose work runs at the end, one piece of a random stream at a time."""

    def __init__(self, pick: Callable[[list[Stream]], Stream]) -> None:
        self._pick = pick
        self.main, self.reducing = Stream(), Stream()
        self.arriving, self.updates, self.leaving = Stream(), Stream(), Stream()
        self._current = self.main

    @contextmanager
    def inside(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    @contextmanager
    def update_after_current(self, scale: Tensor) -> Iterator[None]:
        event = self.mark()
        with self.inside(self.updates):
            self.wait(event)
            yield

    def run(self, action: Callable[[], object]) -> None:
        self._current.waiting.append(action)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.run(lambda: target.copy_(source))

    def mark(self) -> Event:
        event = Event()
        self.run(event.happen)
        return event

    def wait(self, event: Any) -> None:
        if event is not None:
            self._current.waiting.append(event)

    @property
    def streams(self) -> list[Stream]:
        return [self.main, self.reducing, self.arriving, self.updates, self.leaving]

    def drain(self) -> None:
        """Run everything."""
        self.run_without(None)
        assert not any(stream.waiting for stream in self.streams), "streams wait for one another"

    def run_without(self, stopped: Stream | None) -> None:
        """Run what can run while one stream does nothing."""
        while ready := [stream for stream in self.streams if stream.can_run and stream is not stopped]:
            action = self._pick(ready).waiting.popleft()
            if not isinstance(action, Event):
                action()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run what is queued in a thread."""
        ends = threading.Event()
        thread = threading.Thread(target=self._run_until, args=(ends,))
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()

    def _run_until(self, ends: threading.Event) -> None:
        while not ends.wait(0.001):
            self.run_without(None)


class QueuedAdam(Adam):
    """The update as a kernel: queued in the current stream."""

    def __init__(self, config: OptimizationConfig, queues: AnyOrder) -> None:
        super().__init__(config, Ops("reference"))
        self._queues = queues

    def update_state(self, state: HeldState, numbers: UpdateNumbers) -> None:
        self._queues.run(lambda: super(QueuedAdam, self).update_state(state, numbers))


class QueuedLamb(Lamb):
    """The two passes of LAMB as kernels: queued in the current stream. The norms need the first one here and now."""

    def __init__(self, config: OptimizationConfig, queues: AnyOrder) -> None:
        super().__init__(config, Ops("reference"), lambda _kind, cells: cells, by_line=False)
        self._queues = queues

    def update_moments(self, state: HeldState, numbers: UpdateNumbers) -> list[Tensor]:
        parts = [clip_span(span, state) for span in tensor_spans(state.bucket, {})]
        counts = [-(-end // LINE) - begin // LINE if begin < end else 0 for begin, end in parts]
        places = [state.gradient.new_full((count, 2), float("nan")) for count in counts]

        def run() -> None:
            for place, found in zip(places, super(QueuedLamb, self).update_moments(state, numbers), strict=True):
                place.copy_(found)

        self._queues.run(run)
        return places

    def cells(self, state: HeldState, lines: Sequence[Sequence[Tensor]]) -> Tensor:
        made = self._queues.mark()
        self._queues.run_without(self._queues.leaving)
        if not made.happened:
            self._queues.run_without(None)
        return super().cells(state, lines)

    def apply(self, state: HeldState, rates: Tensor, numbers: UpdateNumbers) -> None:
        self._queues.run(lambda: super(QueuedLamb, self).apply(state, rates, numbers))
