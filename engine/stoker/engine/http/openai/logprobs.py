"""Log-probabilities as the two kinds of completion write them.

Called by `chat` and `completions`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from stoker.engine.execution.step import TokenLogprobs
from stoker.engine.http.text import TextCodec

LOWEST = -9999.0
"""JSON has no -inf; OpenAI writes this for a token that cannot come."""


class TokenNames:
    """The written form of tokens: text, or `bytes:\\xe2\\x80` for a part of a character; or `token_id:5`."""

    def __init__(self, codec: TextCodec, *, as_ids: bool = False) -> None:
        self._codec, self._as_ids = codec, as_ids

    def name(self, token: int) -> str:
        if self._as_ids:
            return f"token_id:{token}"
        raw = self._codec.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def raw(self, token: int) -> list[int]:
        return list(self._codec.token_bytes(token))


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def chat_logprobs(names: TokenNames, tokens: Sequence[int], scores: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return `{"content": [{token, logprob, bytes, top_logprobs}]}`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.name(token), "logprob": finite(logprob), "bytes": names.raw(token)}

    content = [
        {**entry(token, score.logprob), "top_logprobs": [entry(other, value) for other, value in score.top]}
        for token, score in zip(tokens, scores, strict=True)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    names: TokenNames, tokens: Sequence[int], offsets: Sequence[int], scores: Sequence[TokenLogprobs | None]
) -> dict[str, Any]:
    """Return `{tokens, token_logprobs, top_logprobs, text_offset}`, with null for a prompt's first token."""
    return {
        "tokens": [names.name(token) for token in tokens],
        "token_logprobs": [None if score is None else finite(score.logprob) for score in scores],
        "top_logprobs": [
            None if score is None else _top(names, token, score) for token, score in zip(tokens, scores, strict=True)
        ],
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    names: TokenNames, tokens: Sequence[int], scores: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's `prompt_logprobs`: by token id, null for the first token."""
    return [
        None if score is None else _ranked(names, token, score, num_top)
        for token, score in zip(tokens, scores, strict=True)
    ]


def _ranked(names: TokenNames, token: int, score: TokenLogprobs, num_top: int) -> dict[str, dict[str, Any]]:
    ranks = {token: score.rank} | {other: rank for rank, (other, _) in enumerate(score.top, 1)}
    values = {**dict(score.top[:num_top]), token: score.logprob}
    return {
        str(other): {"logprob": finite(value), "rank": ranks[other], "decoded_token": names.name(other)}
        for other, value in values.items()
    }


def _top(names: TokenNames, token: int, score: TokenLogprobs) -> dict[str, float]:
    """The most probable tokens and the chosen one; of two tokens with the same name the more probable stays."""
    top: dict[str, float] = {}
    for other, value in (*score.top, (token, score.logprob)):
        top.setdefault(names.name(other), finite(value))
    return top
