"""Deltas that wait for a front, joined: one for all that a choice got meanwhile.

A front that is busy, or whose client reads slowly, has the output of several steps before it. Each delta costs it an
event and a call of the system; one event with all tokens costs little more than one with one of them. Pure; called by
`core_client`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from stoker.engine.core.messages import Delta

MOST_JOINED = 128
"""Deltas that are joined at once: with 20 alternatives for each token they make an event of 200 KB, far below what
routers and clients take."""
GIVEN_UP = ("error", "abort")
"""Reasons that end the whole answer."""


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Join the deltas of one request by choice, in the order in which the choices appear.

    One by which the core gave a choice up stays by itself and comes last, so that all output before it is seen.
    """
    if len(deltas) == 1:
        return list(deltas)
    by_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        if delta.finish_reason not in GIVEN_UP:
            by_choice.setdefault(delta.choice, []).append(delta)
    return [*map(_joined, by_choice.values()), *(delta for delta in deltas if delta.finish_reason in GIVEN_UP)]


def _joined(parts: Sequence[Delta]) -> Delta:
    """The deltas of one choice as one: what came first of the prompt, what came last of the end."""
    if len(parts) == 1:
        return parts[0]
    first, last = parts[0], parts[-1]
    scores = [part.logprobs for part in parts if part.logprobs is not None]
    return last._replace(
        tokens=tuple(chain.from_iterable(part.tokens for part in parts)),
        logprobs=tuple(chain.from_iterable(scores)) if scores else None,
        prompt_logprobs=first.prompt_logprobs,
        facts=last.facts or first.facts,
    )
