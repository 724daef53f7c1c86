"""Checks of a new request against the model's limits. They hold for every caller.

A front has checked tokens and lengths already, to answer with its own field names and before the request crosses the
wire. `LLM` and other users of the engine have no front.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker.engine.core.grammars import GrammarCompiler, no_compiler
from stoker.engine.core.token_constraint import TokenConstraint, shaping_fields
from stoker.engine.errors import RequestRefused
from stoker.engine.sampling import SamplingParams


@dataclass(frozen=True)
class ModelLimits:
    """Limits of requests that follow from the model."""

    vocab_size: int
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...]

    def stop_tokens(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end a choice."""
        eos = () if params.ignore_eos else self.eos_token_ids
        return frozenset((*eos, *params.stop_token_ids))


def check_prompt(limits: ModelLimits, prompt: Sequence[int], params: SamplingParams) -> int:
    """Return the largest number of tokens to sample, at least one. Raises RequestRefused."""
    if not prompt:
        raise RequestRefused("invalid", "prompt must have at least one token", "prompt")
    _check_tokens(limits, prompt, "prompt")
    params.check_vocabulary(limits.vocab_size)
    return _max_tokens(limits, len(prompt), params)


def check_resumed(
    limits: ModelLimits, params: SamplingParams, resumed: Sequence[tuple[int, ...] | None], max_tokens: int
) -> None:
    """Refuse tokens that this request cannot have, and a request of which nothing is left to do."""
    if not resumed:
        return
    if params.prompt_logprobs is not None or params.seed is None:
        raise RequestRefused("invalid", "resumed needs a seed and allows no prompt_logprobs", "resumed")
    if len(resumed) != params.n or all(tokens is None for tokens in resumed):
        raise RequestRefused("invalid", f"resumed must have tokens of {params.n} choices, one unfinished", "resumed")
    for tokens in (tokens for tokens in resumed if tokens is not None):
        if len(tokens) >= max_tokens:
            message = f"resumed must have less than max_tokens, {max_tokens}, of a choice, got {len(tokens)}"
            raise RequestRefused("invalid", message, "resumed")
        _check_tokens(limits, tokens, "resumed")


def _check_tokens(limits: ModelLimits, tokens: Sequence[int], field: str) -> None:
    wrong = next((token for token in tokens if not 0 <= token < limits.vocab_size), None)
    if wrong is not None:
        allowed = f"token ids from 0 to {limits.vocab_size - 1}"
        raise RequestRefused("invalid", f"{field} must hold {allowed}, got {wrong}", field)


def _max_tokens(limits: ModelLimits, num_prompt: int, params: SamplingParams) -> int:
    longest = limits.max_model_len
    if num_prompt + (not params.prompt_only) > longest:
        beside = "" if params.prompt_only else "with one output token "
        message = f"the prompt has {num_prompt} tokens, and {beside}at most {longest} fit"
        raise RequestRefused("too_long", message, "prompt")
    if params.max_tokens is not None and num_prompt + params.max_tokens > longest:
        message = f"{num_prompt} prompt tokens and max_tokens {params.max_tokens} are more than the {longest} that fit"
        raise RequestRefused("too_long", message, "max_tokens")
    max_tokens = longest - num_prompt if params.max_tokens is None else params.max_tokens
    if params.min_tokens > max_tokens:
        message = f"min_tokens must be at most {max_tokens}, what is left of {longest}, got {params.min_tokens}"
        raise RequestRefused("invalid", message, "min_tokens")
    return max(max_tokens, 1)


def constraint_of(
    params: SamplingParams, limits: ModelLimits, grammars: GrammarCompiler | None
) -> TokenConstraint | None:
    """The constraint of the request's tokens. A grammar that the core has compiled in a thread is found again.

    Raises:
        RequestRefused: the grammar is not valid, there is no compiler, or no token can begin the output.
    """
    if not params.constrained:
        return None
    matcher = None
    if params.grammar is not None:
        if grammars is None:
            raise no_compiler(params.grammar)
        matcher = grammars.compile(params.grammar)
    made = TokenConstraint(params, matcher, limits.vocab_size, limits.stop_tokens(params), limits.eos_token_ids)
    made.allowed((), 0)
    if made.error:
        raise RequestRefused("invalid", made.error, shaping_fields(params)[-1])
    return made
