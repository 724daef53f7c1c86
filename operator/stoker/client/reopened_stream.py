"""Which errors of a stream that goes on are borne: those of a gateway that is restarted, or that a proxy cuts off."""

from __future__ import annotations

from stoker.client.errors import GatewayFailed, NoAnswer, StokerError, TooManyRequests
from stoker.pod.patience import Patience

REOPEN_S = 1.0
"""Pause before a stream is opened again."""
SILENCE_S = 60.0
"""Time after which a silent stream is lost; the gateway shows each 15 s that one is alive."""
BORNE = (NoAnswer, GatewayFailed, TooManyRequests)


class ReopenedStream:
    """The errors of one stream after the other, about the same thing."""

    def __init__(self) -> None:
        self._begun, self._patience = False, Patience()

    def heard(self) -> None:
        """Note that the gateway answers."""
        self._begun = True
        self._patience.heard()

    def lost(self, error: NoAnswer | StokerError) -> None:
        """Note that a stream ended. Raises `error` if it is a refusal, comes first, or lasts for five minutes."""
        if not self._begun or not isinstance(error, BORNE):
            raise error
        self._patience.missed(error)
