"""Threads for calls that may wait for a disk, however long; they never keep the program from ending."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class IoThreads:
    """Carry calls out, in their order where there is one thread."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Begin a call. A cancelled future's call is left out if it has not begun."""
        future: Future[T] = Future()
        self._queue.put((future, call))
        return future

    def close(self, timeout_s: float) -> None:
        """End after what was submitted; do not wait for longer."""
        for _ in self._threads:
            self._queue.put(None)
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(until_s - time.monotonic(), 0.0))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - the future's reader handles it
                future.set_exception(error)
            else:
                future.set_result(result)
