"""The thread in which a rank computes, so that a core is not lost in a collective when another rank is.

Owned by the executors of several ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class RankThread:
    """Calls in order in one thread, which does not hold up the end of the process."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="rank 0", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._calls.put((future, call))  # type: ignore[arg-type]
        return future

    def close(self, timeout_s: float) -> None:
        self._calls.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - the future carries it to who waits
                future.set_exception(error)
