"""Deltas with facts: the first of a choice, and the last."""

from __future__ import annotations

from stoker.engine.core.messages import Delta, FinishReason
from stoker.engine.core.request import Sequence
from stoker.engine.execution.step import TokenLogprobs

Addressed = tuple[str, Delta]
"""(front, delta)."""


def first_or_final_delta(
    sequence: Sequence, token: int, logprobs: TokenLogprobs | None, reason: FinishReason | None, now_s: float, *,
    starts: bool,
) -> Addressed:  # fmt: skip
    """The delta of a token that is a choice's first or last.

    `starts`: it shows that the prompt is computed, and so has the prompt's log-probabilities.
    """
    shown = (token,) if sequence.stop_token is None and not sequence.request.params.prompt_only else ()
    scores_prompt = starts and sequence.request.params.prompt_logprobs is not None
    front, request_id = sequence.request.key
    return front, Delta(
        request_id=request_id,
        choice=sequence.choice,
        tokens=shown,
        logprobs=(logprobs,) * (len(shown) + (sequence.stop_token is not None)) if logprobs is not None else None,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if scores_prompt else None,
        finish_reason=reason,
        stop_token=sequence.stop_token,
        facts=sequence.facts(now_s),
    )


def final_delta(sequence: Sequence, choice: int, reason: FinishReason, error: str | None, now_s: float) -> Addressed:
    """The delta without tokens that ends a choice, which may not have forked from `sequence` yet."""
    front, request_id = sequence.request.key
    return front, Delta(request_id, choice, (), finish_reason=reason, error=error, facts=sequence.facts(now_s))


def invalid_delta(sequence: Sequence, now_s: float) -> Addressed:
    """The delta that ends a choice for which no valid token was found: by its own constraint, or by the model."""
    constraint = sequence.constraint
    if constraint is None or not constraint.error:
        return final_delta(sequence, sequence.choice, "error", "the model's logits are not finite", now_s)
    front, delta = final_delta(sequence, sequence.choice, "error", constraint.error, now_s)
    return front, delta._replace(error_field=constraint.field)
