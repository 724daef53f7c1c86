"""Waiting sequences whose beginning a running one is just computing: they wait for its blocks. Pure.

Blocks can be found in the prefix cache once their step has ended. A sequence that is admitted before that computes the
same blocks again. So it is passed over as long as steps in flight compute its next block, where the blocks that both
have in common are worth more than the wait, which costs about one step of decodes.

Each wait ends with the steps in flight. Where the other sequence pauses, is preempted, fails or ends, none of them
computes the next block, and the sequence is admitted with the blocks that are there.

Owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from stoker.engine.core.blocks import BlockManager
from stoker.engine.core.request import Sequence

WORTH_TOKENS = 256
"""Tokens that a GPU computes in about the time of a step of decodes, which reads all weights once."""
MOST_PASSED = 32
"""Waiting sequences that one step passes over: each costs the host the search for its prefix."""


class AwaitedBlocks:
    """Decides who waits for blocks that are being computed."""

    def __init__(self, blocks: BlockManager, worth_tokens: float = WORTH_TOKENS) -> None:
        """`worth_tokens`: least number of tokens whose computation is worth the wait; infinite: none waits."""
        self.blocks, self.worth_tokens = blocks, worth_tokens

    def computing(self, running: Seq[Sequence]) -> list[Sequence]:
        """Return the running sequences that others could wait for: steps in flight compute some of their blocks, and
        enough of their tokens cannot be found yet."""
        size = self.blocks.block_size
        if not self.blocks.prefix_cache:
            return []
        worth = -(-self.worth_tokens // size)
        found = [(one, self.blocks.num_committed(one)) for one in running]
        return [
            one for one, known in found if known < one.num_computed // size and len(one.tokens) // size >= known + worth
        ]

    def pass_over(self, waiting: Seq[Sequence], place: int, computing: Seq[Sequence]) -> int:
        """Return the first place from `place` on whose sequence awaits no blocks of `computing`; the end of `waiting`
        if there is none among the first `MOST_PASSED`."""
        while place < len(waiting) and self.awaits(waiting[place], computing):
            place += 1
            if place >= MOST_PASSED:
                return len(waiting)
        return place

    def awaits(self, sequence: Sequence, computing: Seq[Sequence]) -> bool:
        """Whether one of `computing` is just computing the next blocks of this sequence."""
        size = self.blocks.block_size
        salt = sequence.request.salt
        same = [other for other in computing if other.request.salt == salt]
        alike = [other for other in same if other.tokens[:size] == sequence.tokens[:size]]
        if not alike or sequence.request.params.prompt_logprobs is not None:
            return False  # one that scores its prompt reads no cache
        found = self.blocks.num_findable(sequence.tokens, salt)
        return any(self._saves(sequence, found, other) for other in alike)

    def _saves(self, sequence: Sequence, found: int, other: Sequence) -> bool:
        """Whether the sequence, of which `found` blocks can be found, saves enough by waiting for the other one."""
        size = self.blocks.block_size
        if not self.blocks.num_committed(other) <= found < other.num_computed // size:
            return False  # no step in flight computes the next block
        return (common_blocks(sequence.tokens, other.tokens, size) - found) * size >= self.worth_tokens


def common_blocks(tokens: Seq[int], others: Seq[int], size: int) -> int:
    """Count the leading blocks of `size` tokens that are equal in both. The block with the last token of `tokens` is
    left out: that token is always computed."""
    most = min((len(tokens) - 1) // size, len(others) // size)
    places = (slice(index * size, (index + 1) * size) for index in range(most))
    return next((index for index, place in enumerate(places) if tokens[place] != others[place]), most)
