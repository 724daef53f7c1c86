"""The shapes of passes: which are worth a CUDA graph, and which of them a step takes. Pure: no device, no tensor.

A pass has `tokens` rows: first those of at most `decodes` sequences that decode, then those of at most `prompts` chunks
of prompts; the rest is padding. A pass without prompts has one row per sequence. Launching the kernels of a pass one by
one costs the host 16 ms with 32 layers, often twice that, and what has arrived or is computed meanwhile waits; a graph
costs it less than one. Longer passes than `MOST_TOKENS` keep the device busy for several times as long.

Called by the runner and `step_graphs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MOST_TOKENS = 2048
TOKENS = (
    16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 528, 544, 576, 640, 768, 896, 1024, 1280, 1536, 1792, MOST_TOKENS,
)  # fmt: skip
"""Sizes of passes with prompts. At most half of a pass's rows are padding, above 512 a fifth. 528 and 544 are for a
prompt of 512 beside decodes; 448 would be slower than 512 (figures in bench/README.md)."""
DECODES = (8, 64)
"""Decodes of passes with prompts, beside the number of seats. An unused row costs next to nothing, but the attention
splits the keys of few decodes into more parts."""
FEW_DECODES_TOKENS = 640
"""Longest pass with prompts that also has a shape for the fewest decodes."""
TOKENS_PER_PROMPT = 32
FEWEST_PROMPTS = 4
FIRST_DECODES = 4
"""Decode shapes that are always captured before the first request, the smallest."""
COVER_TOKENS = (64, 128, 256, 576, 1024, 1536, MOST_TOKENS)
COVER_DECODES = (16, 32, 64, 128, 256)
"""Sizes captured next, so that every step soon has a graph whose padding is worth it."""
BESIDE_TOKENS = (528, 544, 576)
"""Sizes of the cover that come before its others: a prompt's 512 tokens beside few decodes, the step that most requests
of a busy server wait for."""
COVER_UNSAMPLED = (8, 64)
"""Decode shapes without output layer and sampler, beside the number of seats: for rows that request filters or more."""
ROWS_PER_DECODE = 8
"""Rows of decodes that cost about as much as one of a prompt: few rows wait for the weights, not for products."""
OUTPUT_ROWS = 8
"""Samples outside of graphs are padded to a multiple of it."""
FEW_OUTPUT_ROWS = 4
"""So few are not: their kernels are others (`few_rows`)."""
WORTH_ROWS = 512
"""Rows of padding that cost the device about as much as launching one by one costs the host."""


class PassShape(NamedTuple):
    """The fixed size of a pass, and what it computes. One with prompts ends with hidden states."""

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
        """Shapes that are always captured before the first request, however long it takes: the smallest of decodes,
        the largest of each kind, and those of a prompt's piece beside few decodes. A fresh server that launches these
        one by one falls behind its requests, has more of them at once, and then lacks graphs of larger steps, too."""
        return tuple(dict.fromkeys((*self.decodes[:FIRST_DECODES], *self.mixed[-1:], *self.decodes[-1:], *self.beside)))

    @property
    def beside(self) -> tuple[PassShape, ...]:
        """Shapes of a prompt's piece beside few decodes."""
        few = min(DECODES[1], self.decodes[-1].decodes)
        return tuple(shape for shape in self.mixed if shape.tokens in BESIDE_TOKENS and shape.decodes == few)

    @property
    def cover(self) -> tuple[PassShape, ...]:
        """Shapes that together serve every step with little padding. The largest comes first, so that all share its
        memory; then those of decodes, which most steps are; then those of a prompt's piece beside few of them."""
        most = self.decodes[-1:]
        mixed = [
            shape
            for shape in reversed(self.mixed)
            if (shape.tokens in COVER_TOKENS and shape.decodes != DECODES[0]) or shape == self.mixed[-1]
        ]
        decodes = [shape for shape in self.decodes if shape.decodes in COVER_DECODES]
        unsampled = [shape for shape in self.decodes if shape.decodes in COVER_UNSAMPLED]
        plain = [shape._replace(samples=False) for shape in dict.fromkeys((*unsampled, *most))]
        return tuple(dict.fromkeys((*mixed[:1], *most, *decodes, *self.beside, *mixed, *plain)))

    @property
    def order(self) -> tuple[PassShape, ...]:
        """Order of capture."""
        return tuple(dict.fromkeys((*self.first, *self.cover, *reversed(self.decodes), *reversed(self.mixed))))

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


def output_rows(num_samples: int) -> int:
    """Rows for which the output layer is computed where so many are sampled outside of a graph: cuBLAS may have another
    kernel for any number of rows, and loads it at its first use, for which it waits until the device is idle."""
    return num_samples if num_samples <= FEW_OUTPUT_ROWS else -(-num_samples // OUTPUT_ROWS) * OUTPUT_ROWS


def padded_rows(sample_rows: np.ndarray) -> np.ndarray:
    """The rows of samples, and the last of them again as padding."""
    missing = output_rows(len(sample_rows)) - len(sample_rows)
    return np.concatenate((sample_rows, np.repeat(sample_rows[-1:], missing)))


def all_output_rows(num_seats: int) -> tuple[int, ...]:
    """Every number of rows that `output_rows` returns, the largest first."""
    return tuple(sorted({output_rows(number) for number in range(1, num_seats + 1)}, reverse=True))


def mixed_shapes(num_seats: int, max_tokens: int) -> Iterator[PassShape]:
    for tokens in (*(size for size in TOKENS if size < max_tokens), max_tokens):
        prompts = min(max(FEWEST_PROMPTS, tokens // TOKENS_PER_PROMPT), num_seats)
        for decodes in (*DECODES, num_seats):
            if decodes != DECODES[0] or tokens <= FEW_DECODES_TOKENS:
                yield PassShape(tokens, min(decodes, num_seats, tokens), prompts, samples=False)


def lost_rows(wanted: PassShape, found: PassShape | None) -> int:
    """What a step loses without the graph of the wanted shape, in rows of a prompt: the padding of the stand-in
    `found`, or the launches one by one; at least 1."""
    if found is None:
        return WORTH_ROWS
    rows = found.tokens - wanted.tokens
    return max(rows if wanted.prompts else rows // ROWS_PER_DECODE, 1)


def stand_in(
    wanted: PassShape, num_tokens: int, num_decodes: int, num_prompts: int, captured: Iterable[PassShape]
) -> PassShape | None:
    """The captured shape with the least padding that can take a step in place of the wanted one. None: launching its
    kernels one by one costs less.

    A shape that ends with hidden states can take any step of its kind.
    """
    kinds = {(wanted.samples, wanted.filtered), (False, False)}
    able = (
        shape
        for shape in captured
        if bool(shape.prompts) == bool(wanted.prompts)
        and (shape.samples, shape.filtered) in kinds
        and all(map(int.__ge__, shape[:3], (num_tokens, num_decodes, num_prompts)))
        and shape.tokens <= num_tokens + WORTH_ROWS
    )
    return min(able, key=lambda shape: (shape.tokens, not shape.samples, shape.decodes), default=None)
