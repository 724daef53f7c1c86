"""The tokens that a sequence may choose next: by a grammar, a list of allowed tokens, and words that must not come.

Bits are packed as in `execution.step.SeatMask`. No tensor and no device here.

A request has one at its start; each of its sequences gets a copy and follows its own tokens. Changed by the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from stoker.engine.core.grammars import shortened
from stoker.engine.sampling import SamplingParams


class TokenConstraint:
    """The constraint of one sequence, as far as its tokens are known."""

    def __init__(
        self,
        params: SamplingParams,
        matcher: Any | None,
        vocab_size: int,
        stop_tokens: Iterable[int],
        eos: Sequence[int],
    ) -> None:
        """`matcher`: the compiled grammar at its start, which is copied; `stop_tokens` end the sequence."""
        self.params, self.vocab_size = params, vocab_size
        self.stop_tokens, self.eos = tuple(stop_tokens), tuple(eos)
        self.error = ""
        """The reason why no token can follow."""
        self._matcher = None if matcher is None else matcher.deep_copy()
        self._listed = None if params.allowed_token_ids is None else packed(params.allowed_token_ids, vocab_size)

    def copy(self) -> TokenConstraint:
        """A constraint for another sequence that has the same tokens."""
        return TokenConstraint(self.params, self._matcher, self.vocab_size, self.stop_tokens, self.eos)

    @property
    def field(self) -> str:
        """The field of the request that an error names."""
        return shaping_fields(self.params)[-1] if self._matcher is None else shaping_fields(self.params)[0]

    @property
    def needs_tokens(self) -> bool:
        """Whether the next tokens depend on those before, so that each must be known first."""
        return self._matcher is not None or bool(self.params.bad_sequences)

    def allowed(self, tokens: Sequence[int], num_output: int) -> bytes:
        """The tokens that may follow `tokens`, of which every one was accepted. None at all after an error.

        `num_output`: tokens of the output before the next one, with those that are still being sampled.
        """
        bits = self._by_grammar()
        if self._listed is not None:
            bits &= self._listed
        for sequence in self.params.bad_sequences:
            *before, last = sequence
            if not before or list(tokens[-len(before) :]) == before:
                bits[last // 8] &= ~(1 << last % 8) & 0xFF
        if not self.error and not self._unbanned(bits, num_output).any():
            self.error = f"no token is left that {' and '.join(shaping_fields(self.params))} allow together"
        return bits.tobytes()

    def accept(self, token: int) -> bool:
        """Follow one chosen token. True: the grammar is complete, and nothing can follow."""
        if self._matcher is None:
            return False
        if not self._matcher.consume_token(token):
            self.error = f"the grammar cannot follow token {token}: {shortened(self._matcher.get_error())}"
            return False
        return bool(self._matcher.is_stopped())

    def _unbanned(self, bits: np.ndarray, num_output: int) -> np.ndarray:
        """The bits without the tokens that the sampler bans: bad ones, and those that end before `min_tokens`."""
        early = self.stop_tokens if num_output < self.params.min_tokens else ()
        banned = (*self.params.bad_token_ids, *early)
        return bits & ~packed(banned, self.vocab_size) if banned else bits

    def _by_grammar(self) -> np.ndarray:
        if self._matcher is None:
            return np.full(-(-self.vocab_size // 8), 0xFF, dtype=np.uint8)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)[: -(-self.vocab_size // 8)].copy()
        if self._matcher.is_error():
            self.error = f"the grammar is too complex here: {shortened(self._matcher.get_error())}"
            bits[:] = 0
            return bits
        can_end = self._matcher.is_accepting()
        for token in self.eos:
            bits[token // 8] &= ~(1 << token % 8) & 0xFF
        for token in self.stop_tokens if can_end else ():
            bits[token // 8] |= 1 << token % 8
        return bits


def shaping_fields(params: SamplingParams) -> list[str]:
    """The fields of a request that leave tokens out."""
    grammar = params.grammar
    given = {
        grammar.field if grammar is not None else "": grammar is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_sequences),
        "bad_token_ids": bool(params.bad_token_ids),
        "min_tokens": params.min_tokens > 0,
    }
    return [field for field, is_given in given.items() if is_given]


def packed(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """One bit per token of the vocabulary, set for these."""
    chosen = np.zeros(-(-vocab_size // 8) * 8, dtype=np.uint8)
    chosen[list(tokens)] = 1
    return np.packbits(chosen, bitorder="little")
