"""A model that costs nothing and forgives nothing: its cache holds a digest of all tokens up to each position.

The next token follows from the digest before it, the seed, the choice and the position. A block that holds anything but
what it should, from a wrong place or a wrong prompt, changes every later token.
"""

from __future__ import annotations

import hashlib

import numpy as np

from stoker.engine.execution.step import StepInput, StepOutput, TokenLogprobs
from stoker.engine.sampling import SamplingParams
from stoker.engine.transfer.layout import BlockLayout

WORD = 8
"""Bytes of one position."""


class DigestRunner:
    """All ranks. A word lies in the cache as keys and values of two heads do, which several ranks divide."""

    def __init__(self, num_blocks: int, block_size: int, vocab: int, ranks: int = 1) -> None:
        self.block_size, self.vocab = block_size, vocab
        shape = (num_blocks, 2, block_size, WORD // 2 // ranks)
        self._parts = [np.zeros(shape, dtype=np.uint8) for _ in range(ranks)]
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
        for part in self._parts:
            part[list(step.cleared)] = 0
            copied = [part[source].copy() for source, _ in step.copies]
            for data, (_, target) in zip(copied, step.copies, strict=True):
                part[target] = data
        ends = [
            self._compute(seat, start, start + length)
            for seat, start, length in zip(step.seats, step.starts, step.lengths, strict=True)
        ]
        tokens, scores, masks = [], [], dict(step.masks)
        for chunk, seat in zip(step.sample_chunks, step.sample_seats, strict=True):
            end = step.starts[chunk] + step.lengths[chunk]
            token, score = self._sample(seat, ends[chunk], end, masks.get(seat))
            tokens.append(token)
            scores.append(score)
        valid = (True,) * len(tokens)
        return StepOutput(step.number, tuple(tokens), valid, tuple(scores), ((),) * len(step.seats))

    @property
    def caches(self) -> list[np.ndarray]:
        """Of each rank: [blocks, bytes of its part] uint8."""
        return [part.reshape(len(part), -1) for part in self._parts]

    @property
    def layout(self) -> BlockLayout:
        """Of a block of all ranks."""
        return BlockLayout(0, 1, self.block_size, 0, 2, WORD // 4, "float8_e4m3fn")

    def _places(self, seat: int, position: int) -> list[np.ndarray]:
        """A position's word, in the parts of all ranks, views."""
        block, offset = divmod(position, self.block_size)
        return [part[self._table[seat][block], :, offset] for part in self._parts]

    def _load(self, seat: int, position: int) -> bytes:
        return np.concatenate(self._places(seat, position), axis=1).tobytes()

    def _store(self, seat: int, position: int, word: bytes) -> None:
        whole, begin = np.frombuffer(word, dtype=np.uint8).reshape(2, -1), 0
        for place in self._places(seat, position):
            place[:] = whole[:, begin : begin + place.shape[1]]
            begin += place.shape[1]

    def _compute(self, seat: int, start: int, end: int) -> bytes:
        """Continue the digest behind what the cache holds. Returns the last one."""
        digest = self._load(seat, start - 1) if start else bytes(WORD)
        for position in range(start, end):
            digest = _next(digest, self._tokens[seat][position])
            self._store(seat, position, digest)
        return digest

    def _sample(self, seat: int, digest: bytes, position: int, mask: bytes | None) -> tuple[int, TokenLogprobs | None]:
        """Draw a token. `mask`: the bits of those that a grammar allows; None: any but the first."""
        params, choice = self._params[seat]
        drawn = hashlib.blake2b(digest + repr((params.seed, choice, position)).encode(), digest_size=8).digest()
        number = int.from_bytes(drawn, "little")
        allowed = range(1, self.vocab) if mask is None else tokens_of(mask)
        token = int(allowed[number % len(allowed)])
        del self._tokens[seat][position:]
        self._tokens[seat].append(token)
        return token, TokenLogprobs(-(number % 1000) / 1000, ()) if params.logprobs is not None else None


def tokens_of(mask: bytes) -> np.ndarray:
    """The tokens whose bits are set."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little"))


def _next(digest: bytes, token: int) -> bytes:
    return hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=WORD).digest()
