"""Sends cache events to subscribers over ZeroMQ, in a thread of its own, as vLLM's engines do.

    PUB     topic, sequence (8 bytes, big-endian, from 0), batch (msgpack)
    ROUTER  request: empty, first sequence (8 bytes)
            answers: empty, sequence, batch ... then empty, -1, empty

A subscriber that finds a gap in the sequences, or begins late, asks for what it missed; the newest `buffer_steps`
batches are kept. Sequences begin at 0 with each start of the engine, whose first event is `AllBlocksCleared`.

The core's thread only puts batches into a queue: a slow subscriber never delays a step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from stoker.engine.config import CacheEventsConfig
from stoker.engine.core.cache_events import CacheEvent, CacheEventLog, encode_batch
from stoker.pod.config_file import ConfigError

END = (-1).to_bytes(8, "big", signed=True)
"""Sequence of the last answer to a request."""


class CacheEventPublisher:
    """The thread and its sockets. `publish` belongs to the core's thread."""

    def __init__(
        self,
        config: CacheEventsConfig,
        log: CacheEventLog,
        *,
        medium: str,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`medium`: `GPU` or `CPU`, where the cache is.

        Raises:
            ConfigError: an endpoint cannot be bound.
        """
        self._log, self._medium, self._unix_time, self._rank = log, medium, unix_time, config.rank
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._batches: queue.SimpleQueue[list[CacheEvent]] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._pub = self._bind(zmq.PUB, "cache_events.endpoint", config.endpoint, config.hwm)
        replay = config.replay_endpoint
        self._replay = (
            self._bind(zmq.ROUTER, "cache_events.replay_endpoint", replay, config.hwm) if replay is not None else None
        )
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT) if self._replay is not None else None
        wake = f"inproc://cache-events-{id(self)}"
        self._bell = self._context.socket(zmq.PAIR)
        self._bell.bind(wake)
        self._ear = self._context.socket(zmq.PAIR)
        self._ear.connect(wake)
        self._thread = threading.Thread(target=self._run, name="cache events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, field: str, endpoint: str, hwm: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(zmq.SNDHWM, hwm)
        made.setsockopt(zmq.LINGER, 0)
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{field} {endpoint!r} cannot be bound: {error}") from error
        return made

    # By the core's thread.

    def publish(self) -> None:
        """Send what the cache has noted since the last call."""
        if events := self._log.take():
            self._batches.put(events)
            with suppress(zmq.Again):  # as many wake-ups wait as fit: one of them is enough
                self._bell.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """Send what was published, and end the thread."""
        if self._thread.is_alive():
            self._bell.send(b"end")
            self._thread.join()
            self._bell.close(linger=0)
            self._context.destroy(linger=100)

    # By the thread.

    def _run(self) -> None:
        poller = zmq.Poller()
        sockets = [self._ear] if self._replay is None else [self._ear, self._replay]
        for one in sockets:
            poller.register(one, zmq.POLLIN)
        while True:
            for one, _ in poller.poll():
                if one is self._replay:
                    self._answer(self._replay)
                elif self._ear.recv() == b"end":
                    self._send_waiting()
                    self._ear.close(linger=0)
                    return
                else:
                    self._send_waiting()

    def _send_waiting(self) -> None:
        while not self._batches.empty():
            self._send(self._batches.get())

    def _send(self, events: Sequence[CacheEvent]) -> None:
        batch = encode_batch(events, self._unix_time(), self._medium, self._rank)
        self._kept.append((self._next, batch))
        self._pub.send_multipart((self._topic, self._next.to_bytes(8, "big"), batch))
        self._next += 1

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the kept batches from the requested one on. A request of another form gets no answer."""
        frames = replay.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, begin = frames[0], int.from_bytes(frames[2], "big")
        for number, batch in self._kept:
            if number >= begin:
                replay.send_multipart((client, b"", number.to_bytes(8, "big"), batch))
        replay.send_multipart((client, b"", END, b""))
