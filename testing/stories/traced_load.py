"""A trace of requests, replayed in an open loop: each is sent when it is due, whatever the server does.

It is replayed at twice the speed each time, so that it is too much in the end for an engine on any machine. Where a
machine is too slow for it, requests are left out, so that none waits for minutes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from testing.clocked.trace import TracedRequest
from testing.stories.load import Answer, read_stream
from testing.stories.waits import TIMEOUT_S

WORDS = ("Then", "the", "boiler", "met", "coal")
FASTEST = 16.0
"""Times the trace's own speed."""
MOST_OPEN = 40
"""Requests that are waiting or answered at once."""


@dataclass
class TracedLoad:
    """The trace, again and again until the context is left; then open streams are read."""

    url: str
    model: str
    trace: Sequence[TracedRequest]
    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __enter__(self) -> TracedLoad:
        self._stop, self._sent = threading.Event(), list[threading.Thread]()
        self._player = threading.Thread(target=self._play)
        self._player.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in (self._player, *self._sent):
            thread.join()

    def _play(self) -> None:
        speed = 1.0
        while not self._stop.is_set():
            began_s = time.monotonic()
            for request in self.trace:
                if self._stop.wait(began_s + request.at_s / speed - time.monotonic()):
                    return
                if sum(sent.is_alive() for sent in self._sent) < MOST_OPEN:
                    self._sent.append(threading.Thread(target=self._send, args=(request,)))
                    self._sent[-1].start()
            speed = min(2 * speed, FASTEST)

    def _send(self, request: TracedRequest) -> None:
        prompt = " ".join(WORDS[place % len(WORDS)] for place in range(request.prompt))
        body = {"model": self.model, "prompt": prompt, "max_tokens": request.output}
        try:
            with httpx.Client(base_url=self.url, timeout=TIMEOUT_S) as client:
                self.answers.append(read_stream(client, body))
        except (httpx.HTTPError, AssertionError, ValueError, KeyError) as error:
            self.failures.append(f"request {request.number}: {type(error).__name__}: {error}")
