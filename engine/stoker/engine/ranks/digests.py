"""Digests of sampled tokens, by which ranks that compute the same steps are compared. Pure; used by two threads.

Every rank samples for itself. If their logits ever differed in a bit that decides a token, their caches would part from
then on, and answers would be wrong without an error. The digest makes it an error about a second later.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from collections.abc import Mapping

from stoker.engine.execution.step import StepOutput


def extended(digest: int, output: StepOutput) -> int:
    """The digest of all tokens so far, and of one more step. Tokens from logits that are not finite do not count."""
    tokens = array("i", (token if valid else -1 for token, valid in zip(output.tokens, output.valid, strict=True)))
    return zlib.crc32(tokens.tobytes(), digest)


class TokenDigests:
    """Rank 0's digest after each step, and what the further ranks have reported."""

    def __init__(self) -> None:
        self.steps = 0
        """Steps whose output rank 0 has read."""
        self._digest = 0
        self._after: dict[int, int] = {0: 0}
        """Steps read -> digest, of those steps that a rank may still report."""
        self._reported: dict[int, tuple[int, int | None]] = {}
        """Rank -> its newest (steps, digest); without a digest where it has no tokens."""
        self._lock = threading.Lock()

    def read(self, output: StepOutput) -> None:
        """Note the output of rank 0's next step."""
        with self._lock:
            self.steps += 1
            self._digest = self._after[self.steps] = extended(self._digest, output)

    def skip(self) -> None:
        """Note a step that no rank has computed."""
        with self._lock:
            self.steps += 1
            self._after[self.steps] = self._digest

    def report(self, rank: int, steps: int, digest: int | None) -> None:
        """Note a further rank's digest after so many steps."""
        with self._lock:
            self._reported[rank] = (steps, digest)

    def differing(self, ranks: int) -> Mapping[int, int]:
        """The further ranks of `ranks` whose tokens differ from rank 0's: rank -> steps until it was noticed."""
        with self._lock:
            wrong = {
                rank: steps
                for rank, (steps, digest) in self._reported.items()
                if digest is not None and steps in self._after and self._after[steps] != digest
            }
            oldest = min((self._reported.get(rank, (0, 0))[0] for rank in range(1, ranks)), default=self.steps)
            for steps in [steps for steps in self._after if steps < min(oldest, self.steps)]:
                del self._after[steps]
            return wrong
