"""The `usage` object.

Counts of prompt, cached and output tokens of one request. Pure; called by `chat` and `completions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.engine.http.generation import Usage


def usage(parts: Sequence[Usage]) -> dict[str, Any]:
    """The sum over the prompts of a request."""
    prompt = sum(part.prompt_tokens for part in parts)
    completion = sum(part.completion_tokens for part in parts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(part.cached_tokens for part in parts)},
    }
