"""Which passes are worth a graph, and which of them a step takes. Pure: no device, no tensor.

A pass has `tokens` rows: the decoding sequences' first, at most `decodes` of them, then those of at most `prompts` chunks of
prompts; what is left is padding. A pass of decodes alone has one row per sequence. Launches of a pass cost the host about as
much as some hundred tokens of an 8B model cost the device, so longer passes gain nothing from a graph and only lose by padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from stoker.model.config import ModelConfig

LAYER_WORK = 1e11
"""Parameters of a layer times tokens that an H200 computes in the time of the layer's launches, 0.3 ms."""
MOST_TOKENS = 2048
TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, MOST_TOKENS)
"""Sizes of passes with prompts: at most half of a pass's rows, mostly a quarter and less, are padding."""
DECODES = (0, 8, 64)
"""And as many as there are seats. A row that is not taken costs only its part of the output layer."""
TOKENS_PER_PROMPT = 32
FEWEST_PROMPTS = 4
FIRST_DECODES = 4
"""Decode sizes whose graphs are there before the first request; the others come in idle time."""


class PassShape(NamedTuple):
    """What a graph holds."""

    tokens: int
    decodes: int
    prompts: int
    """0: a pass of decodes alone."""
    samples: bool = True
    """Output layer and sampler, too; else it ends with hidden states, because some row wants more than the sampler does."""
    filtered: bool = False
    """The sampler's part for top-k, top-p and min-p."""

    @property
    def sequences(self) -> int:
        """Also the most samples: a decode has its own, and as many others as prompts fit."""
        return self.decodes + self.prompts


@dataclass(frozen=True)
class PassShapes:
    """All that may be captured, without the variants of sampling."""

    decodes: tuple[PassShape, ...]
    """Rising."""
    mixed: tuple[PassShape, ...]
    """Passes with prompts, rising in tokens, then in decodes."""

    def choose(self, num_tokens: int, num_decodes: int, num_prompts: int) -> PassShape | None:
        """The smallest that holds a step; `num_prompts`: chunks of prompts, or samples that are nobody's decode where those are more."""
        if not num_prompts:
            return next((shape for shape in self.decodes if shape.decodes >= num_decodes), None)
        wanted = (num_tokens, num_decodes, num_prompts)
        return next((shape for shape in self.mixed if all(map(int.__ge__, shape[:3], wanted))), None)

    @property
    def first(self) -> tuple[PassShape, ...]:
        return self.decodes[:FIRST_DECODES]

    @property
    def idle(self) -> tuple[PassShape, ...]:
        """The largest first, so that all share its memory; then in the order of their use: prompts alone, decodes, both."""
        rest = self.mixed[-2::-1]
        alone = [shape for shape in rest if not shape.decodes]
        both = [shape for shape in rest if shape.decodes]
        return (*self.first, *self.mixed[-1:], *alone, *reversed(self.decodes), *both)

    @property
    def largest(self) -> PassShape:
        """At least as large as each of them in everything."""
        tokens, decodes, prompts = map(max, zip(*(shape[:3] for shape in (*self.decodes, *self.mixed)), strict=True))
        return PassShape(tokens, decodes, prompts)


def pass_shapes(num_seats: int, max_tokens: int) -> PassShapes:
    """`max_tokens`: of a pass with prompts."""
    decodes = tuple(PassShape(size, size, 0) for size in decode_sizes(num_seats))
    return PassShapes(decodes, tuple(sorted(set(mixed_shapes(num_seats, max_tokens)))))


def decode_sizes(num_seats: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 rows up to 256, then every 32, and the number of seats itself."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, num_seats, 32)]
    return (*(size for size in sizes if size < num_seats), num_seats)


def mixed_shapes(num_seats: int, max_tokens: int) -> Iterator[PassShape]:
    for tokens in (*(size for size in TOKENS if size < max_tokens), max_tokens):
        prompts = min(max(FEWEST_PROMPTS, tokens // TOKENS_PER_PROMPT), num_seats)
        for decodes in (*DECODES, num_seats):
            yield PassShape(tokens, min(decodes, num_seats, tokens), prompts)


def most_tokens(model: ModelConfig, max_batch_tokens: int) -> int:
    """Of a pass with prompts: beyond it the device is busy for longer than its launches take."""
    worth = LAYER_WORK / (model.num_parameters / model.num_layers)
    return min(max((size for size in TOKENS if size <= worth), default=TOKENS[0]), max_batch_tokens)
