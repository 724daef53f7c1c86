"""Waiting through an outage: an API server that is restarted, or a network that breaks, ends no wait of hours.

A refusal (a right, a name, a field) ends the command as ever. Called by the verbs of a cluster that wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from stoker.operator.cluster.interface import ClusterError, ServerError, TooManyRequests
from stoker.pod.patience import LONGEST_S, Patience

LOOK_S = 1.0
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
        self._say, self._explain, self._patience = say, explain, Patience(monotonic=monotonic)

    def ask(self, question: Callable[[], T]) -> T | None:
        """Return the answer, or None while the cluster does not answer.

        Raises:
            ClusterError: a refusal, or the outage lasts longer than five minutes.
        """
        try:
            found = question()
        except ClusterError as error:
            if not is_outage(error):
                raise
            if self._patience.missed(error):
                self._say(f"{self._explain(error)}; asking again for {LONGEST_S / 60:g} minutes")
            return None
        if self._patience.heard():
            self._say("the cluster answers again")
        return found

    def insist(self, question: Callable[[], T], sleep: Callable[[float], None] = time.sleep) -> T:
        """Ask until there is an answer. Raises as `ask` does."""
        while (found := self.ask(lambda: (question(),))) is None:
            sleep(LOOK_S)
        return found[0]


def is_outage(error: ClusterError) -> bool:
    """Whether there was no answer, or one that says that the server cannot answer now."""
    return type(error) is ClusterError or isinstance(error, ServerError | TooManyRequests)
