"""Reading beside the tokenizer: a thread reads and parses the next batches while this one is encoded and written.

The tokenizer encodes a batch on all cores and lets other threads run meanwhile. Order and errors are those of the plain
iterator.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Full, Queue
from typing import TypeVar

Item = TypeVar("Item")

DEPTH = 2
"""Batches that wait."""
_POLL_S = 0.05


class _End:
    """The end of the items, with the error that ended them."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def read_ahead(items: Iterator[Item], depth: int = DEPTH) -> Iterator[Item]:
    """Yield the items in their order, taken from the iterator by a thread of its own.

    The thread ends with the items, or when this generator is closed.
    """
    queue: Queue[Item | _End] = Queue(maxsize=depth)
    stopped = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, queue, stopped), name="read-ahead", daemon=True)
    thread.start()
    try:
        while not isinstance(item := queue.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        thread.join()


def _fill(items: Iterator[Item], queue: Queue[Item | _End], stopped: threading.Event) -> None:
    error: BaseException | None = None
    try:
        for item in items:
            if not _put(queue, item, stopped):
                return
    except BaseException as raised:  # noqa: BLE001  it is raised again in the reader's thread
        error = raised
    _put(queue, _End(error), stopped)


def _put(queue: Queue[Item | _End], item: Item | _End, stopped: threading.Event) -> bool:
    while not stopped.is_set():
        try:
            queue.put(item, timeout=_POLL_S)
        except Full:
            continue
        return True
    return False
