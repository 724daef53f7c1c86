"""Waiting through an outage: an API server that is restarted, or a network that breaks, ends no wait of hours.

A refusal (a right, a name, a field) ends the command as ever. Called by the verbs of a cluster that wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from stoker.operator.cluster.interface import ClusterError, ServerError, TooManyRequests

LONGEST_S = 300.0
T = TypeVar("T")


class Outage:
    """The time since which a cluster has not answered.

    Args:
        say: called when an outage begins, and when it is over.
        explain: an error in words for people.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        explain: Callable[[ClusterError], str] = str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._explain, self._monotonic = say, explain, monotonic
        self._since: float | None = None

    def ask(self, question: Callable[[], T]) -> T | None:
        """Return the answer, or None while the cluster does not answer.

        Raises:
            ClusterError: a refusal, or the outage lasts longer than five minutes.
        """
        try:
            found = question()
        except ClusterError as error:
            if not _is_outage(error) or self._lasts_too_long():
                raise
            self._note(error)
            return None
        if self._since is not None:
            self._say("the cluster answers again")
            self._since = None
        return found

    def _lasts_too_long(self) -> bool:
        return self._since is not None and self._monotonic() - self._since > LONGEST_S

    def _note(self, error: ClusterError) -> None:
        if self._since is None:
            self._since = self._monotonic()
            self._say(f"{self._explain(error)}; asking again for {LONGEST_S / 60:g} minutes")


def _is_outage(error: ClusterError) -> bool:
    """Whether there was no answer, or one that says that the server cannot answer now."""
    return type(error) is ClusterError or isinstance(error, ServerError | TooManyRequests)
