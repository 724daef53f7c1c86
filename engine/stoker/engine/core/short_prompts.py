"""Short prompts beside a long one: which may be computed before it, though it came first. Pure.

In the order of arrival alone, a prompt of 100,000 tokens keeps every later one waiting for seconds. So the first prompt
in work leaves up to half of a step's prompt tokens to much shorter ones of its own class and priority, the shortest
first; they may also be admitted before longer ones that wait. It keeps the other half, so its first token comes after
at most twice the time, and nothing starves: each prompt is the first in its turn. Prompts of similar lengths keep their
order, in which their mean time is the shortest.

Used by the scheduler. Routers predict by the same rule (`stoker.pod.prompt_order`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from stoker.engine.core.request import Sequence
from stoker.pod.prompt_order import LOOK_AHEAD, MUCH


def share(budget: int) -> int:
    """Prompt tokens of a step that short prompts may take."""
    return budget // 2


def shorter(long: Sequence, missing: int, behind: Iterable[Sequence], waiting: Iterable[Sequence]) -> list[Sequence]:
    """Return the sequences that may be computed before `long`, the shortest first.

    Args:
        long: the first prompt in work; `missing` of its tokens are still to be computed.
        behind: the others in work.
        waiting: in their order. What the prefix cache has of them is not looked up; of a stream that was taken over it
            is known.
    """
    ahead = [one for one in islice(waiting, LOOK_AHEAD) if not one.num_pending]
    lengths = [(one.missing, one) for one in behind]
    lengths += [(max(one.missing - one.request.held_tokens, 1), one) for one in ahead]
    found = [
        (length, one)
        for length, one in lengths
        if MUCH * length <= missing and one.request.standing == long.request.standing
    ]
    return [one for _, one in sorted(found, key=lambda item: (item[0], item[1].rank))]
