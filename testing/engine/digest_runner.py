"""A model that costs nothing and forgives nothing: its cache holds a digest of all tokens up to each position.

The next token follows from the digest before it, the seed, the choice and the position. A block that holds anything but
what it should, from a wrong place or a wrong prompt, changes every later token.
"""

from __future__ import annotations

import hashlib

import numpy as np

from stoker.engine.execution.step import StepInput, StepOutput, TokenLogprobs
from stoker.engine.sampling import SamplingParams

WORD = 8
"""Bytes of one position."""


class DigestRunner:
    """One rank. `cache_BN` is [blocks, block_size * 8] uint8: of each block the first half of all words, then the
    second, as keys and values lie."""

    def __init__(self, num_blocks: int, block_size: int, vocab: int) -> None:
        self.block_size, self.vocab = block_size, vocab
        self.cache_BN = np.zeros((num_blocks, block_size * WORD), dtype=np.uint8)
        self._words = self.cache_BN.reshape(num_blocks, 2, block_size, WORD // 2)
        self._tokens: dict[int, list[int]] = {}
        self._table: dict[int, dict[int, int]] = {}
        self._params: dict[int, tuple[SamplingParams, int]] = {}

    def run(self, step: StepInput) -> StepOutput:
        for opening in step.openings:
            self._tokens[opening.seat] = list(opening.tokens)
            self._params[opening.seat] = (opening.params, opening.choice)
            self._table[opening.seat] = {}
        for entry in step.table:
            self._table[entry.seat][entry.column] = entry.block
        for block in step.cleared:
            self.cache_BN[block] = 0
        copied = [self.cache_BN[source].copy() for source, _ in step.copies]
        for data, (_, target) in zip(copied, step.copies, strict=True):
            self.cache_BN[target] = data
        ends = [
            self._compute(seat, start, start + length)
            for seat, start, length in zip(step.seats, step.starts, step.lengths, strict=True)
        ]
        tokens, scores = [], []
        for chunk, seat in zip(step.sample_chunks, step.sample_seats, strict=True):
            end = step.starts[chunk] + step.lengths[chunk]
            token, score = self._sample(seat, ends[chunk], end)
            tokens.append(token)
            scores.append(score)
        valid = (True,) * len(tokens)
        return StepOutput(step.number, tuple(tokens), valid, tuple(scores), ((),) * len(step.seats))

    def _place(self, seat: int, position: int) -> np.ndarray:
        """[2, WORD / 2] uint8: a position's word, a view."""
        block, offset = divmod(position, self.block_size)
        return self._words[self._table[seat][block], :, offset]

    def _compute(self, seat: int, start: int, end: int) -> bytes:
        """Continue the digest behind what the cache holds. Returns the last one."""
        digest = self._place(seat, start - 1).tobytes() if start else bytes(WORD)
        for position in range(start, end):
            digest = _next(digest, self._tokens[seat][position])
            self._place(seat, position)[:] = np.frombuffer(digest, dtype=np.uint8).reshape(2, -1)
        return digest

    def _sample(self, seat: int, digest: bytes, position: int) -> tuple[int, TokenLogprobs | None]:
        params, choice = self._params[seat]
        drawn = hashlib.blake2b(digest + repr((params.seed, choice, position)).encode(), digest_size=8).digest()
        number = int.from_bytes(drawn, "little")
        token = 1 + number % (self.vocab - 1)
        del self._tokens[seat][position:]
        self._tokens[seat].append(token)
        return token, TokenLogprobs(-(number % 1000) / 1000, ()) if params.logprobs is not None else None


def _next(digest: bytes, token: int) -> bytes:
    return hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=WORD).digest()
