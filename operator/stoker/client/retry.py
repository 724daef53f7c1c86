"""Whether a request is sent again, and when. Only requests that do nothing the second time are."""

from __future__ import annotations

import httpx

from stoker.client.requests import RETRIED

TRIES = 4
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


class Retry:
    """The tries of one request."""

    def __init__(self, *, repeatable: bool) -> None:
        self.repeatable = repeatable
        self._tries = 0

    def after_silence(self) -> float | None:
        """Seconds to wait after a request without an answer; None to give up."""
        return self._pause(None) if self.repeatable else None

    def after_answer(self, answer: httpx.Response) -> float | None:
        """Seconds to wait before the request is sent again; None when the answer is the last word.

        A 429 did nothing, whatever the request was.
        """
        if answer.status_code not in RETRIED or not (self.repeatable or answer.status_code == 429):
            return None
        return self._pause(answer.headers.get("Retry-After"))

    def _pause(self, asked: str | None) -> float | None:
        self._tries += 1
        if self._tries >= TRIES:
            return None
        own = FIRST_PAUSE_S * 2 ** (self._tries - 1)
        return min(float(asked) if asked and asked.isdigit() else own, LONGEST_PAUSE_S)
