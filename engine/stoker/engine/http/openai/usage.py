"""The `usage` object: counts of prompt, cached and output tokens of one request, and its times.

Pure; called by `answer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.engine.http.job import Usage


def usage(parts: Sequence[Usage], *, timing: bool = False) -> dict[str, Any]:
    """The sum over the prompts of a request; with `timing` also its times."""
    prompt = sum(part.prompt_tokens for part in parts)
    completion = sum(part.completion_tokens for part in parts)
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(part.cached_tokens for part in parts)},
    }
    return {**counts, "timing": times(parts)} if timing else counts


def times(parts: Sequence[Usage]) -> dict[str, float | None]:
    """Seconds of the request's life so far, over all its prompts and choices; null for what has not begun.

    Queue: from arrival to the first step. Prefill: to the first token. Decode: to the last token. Total: from arrival
    to the end.
    """
    facts = [one for part in parts for one in part.facts.values()]
    arrival = min((one.arrival_s for one in facts), default=None)
    scheduled = min((one.scheduled_s for one in facts if one.scheduled_s is not None), default=None)
    first = min((one.first_token_s for one in facts if one.first_token_s is not None), default=None)
    last = max((one.last_token_s for one in facts if one.last_token_s is not None), default=None)
    end = max((one.finished_s for one in facts), default=None)
    return {
        "queue_s": _between(arrival, scheduled),
        "prefill_s": _between(scheduled, first),
        "decode_s": _between(first, last),
        "total_s": _between(arrival, end),
    }


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else round(max(end - begin, 0.0), 6)
