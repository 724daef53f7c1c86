"""The shapes of passes: which are worth a CUDA graph, and which of them a step takes. Pure: no device, no tensor.

A pass has `tokens` rows: first those of at most `decodes` sequences that decode, then those of at most `prompts` chunks
of prompts; the rest is padding. A pass without prompts has one row per sequence. Launching a pass costs the host about
as much time as some hundred tokens of an 8B model cost the device. Longer passes gain nothing from a graph and lose by
padding.

Called by the runner and `step_graphs`.
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
"""Sizes of passes with prompts. At most half of a pass's rows are padding, mostly a quarter and less."""
DECODES = (0, 8, 64)
"""Decodes of passes with prompts, beside the number of seats. An unused row costs only its part of the output layer."""
TOKENS_PER_PROMPT = 32
FEWEST_PROMPTS = 4
FIRST_DECODES = 4
"""Decode shapes captured before the first request; the others are captured in idle time."""


class PassShape(NamedTuple):
    """The fixed size of a pass, and what it computes."""

    tokens: int
    decodes: int
    prompts: int
    """0: the pass has no prompts."""
    samples: bool = True
    """Whether output layer and sampler belong to the pass. Else it ends with hidden states, for rows that the fused
    sampler cannot serve."""
    filtered: bool = False
    """Whether the sampler applies top-k, top-p and min-p."""

    @property
    def sequences(self) -> int:
        """Also the largest number of samples: one per decode, and as many others as prompts."""
        return self.decodes + self.prompts


@dataclass(frozen=True)
class PassShapes:
    """All shapes that may be captured, without the variants of sampling."""

    decodes: tuple[PassShape, ...]
    """Rising."""
    mixed: tuple[PassShape, ...]
    """Passes with prompts, rising in tokens, then in decodes."""

    def choose(self, num_tokens: int, num_decodes: int, num_prompts: int) -> PassShape | None:
        """The smallest shape that holds a step.

        `num_prompts`: chunks of prompts, or samples that belong to no decode where those are more.
        """
        if not num_prompts:
            return next((shape for shape in self.decodes if shape.decodes >= num_decodes), None)
        wanted = (num_tokens, num_decodes, num_prompts)
        return next((shape for shape in self.mixed if all(map(int.__ge__, shape[:3], wanted))), None)

    @property
    def first(self) -> tuple[PassShape, ...]:
        return self.decodes[:FIRST_DECODES]

    @property
    def idle(self) -> tuple[PassShape, ...]:
        """Order of capture in idle time. The largest comes first, so that all share its memory; then by use: prompts
        alone, decodes, both."""
        rest = self.mixed[-2::-1]
        alone = [shape for shape in rest if not shape.decodes]
        both = [shape for shape in rest if shape.decodes]
        return (*self.first, *self.mixed[-1:], *alone, *reversed(self.decodes), *both)

    @property
    def largest(self) -> PassShape:
        """A shape at least as large as each of them in every number."""
        tokens, decodes, prompts = map(max, zip(*(shape[:3] for shape in (*self.decodes, *self.mixed)), strict=True))
        return PassShape(tokens, decodes, prompts)


def pass_shapes(num_seats: int, max_tokens: int) -> PassShapes:
    """The shapes for this number of seats. `max_tokens`: largest pass with prompts."""
    decodes = tuple(PassShape(size, size, 0) for size in decode_sizes(num_seats))
    return PassShapes(decodes, tuple(sorted(set(mixed_shapes(num_seats, max_tokens)))))


def decode_sizes(num_seats: int) -> tuple[int, ...]:
    """Decode sizes: 1, 2, 4, every 8 up to 256, every 32 above, and the number of seats itself."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, num_seats, 32)]
    return (*(size for size in sizes if size < num_seats), num_seats)


def mixed_shapes(num_seats: int, max_tokens: int) -> Iterator[PassShape]:
    for tokens in (*(size for size in TOKENS if size < max_tokens), max_tokens):
        prompts = min(max(FEWEST_PROMPTS, tokens // TOKENS_PER_PROMPT), num_seats)
        for decodes in (*DECODES, num_seats):
            yield PassShape(tokens, min(decodes, num_seats, tokens), prompts)


def most_tokens(model: ModelConfig, max_batch_tokens: int) -> int:
    """Largest pass with prompts. Beyond it the device is busy for longer than the launches take."""
    worth = LAYER_WORK / (model.num_parameters / model.num_layers)
    return min(max((size for size in TOKENS if size <= worth), default=TOKENS[0]), max_batch_tokens)
