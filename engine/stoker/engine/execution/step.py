"""The values of one step: its input and its output, plain numbers that can travel to any rank.

Imports no other part of the engine but the sampling parameters, which are plain values, too.

A seat is a row of the runner's per-sequence tensors (tokens, block table, sampling values). It is opened once with
everything known about its sequence; afterwards a step names only how far each seat goes. The token sampled in one step
is already in the seat's row when the next step starts, so the host need not have seen it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stoker.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Opening:
    """A seat that a sequence takes, with everything known about the sequence."""

    seat: int
    tokens: tuple[int, ...]
    """All known tokens; after a preemption more than the prompt."""
    num_prompt: int
    choice: int
    stop_tokens: tuple[int, ...]
    """Tokens that end the sequence; they cannot be chosen before `params.min_tokens`."""
    params: SamplingParams
    """With a seed."""


class TableEntry(NamedTuple):
    """`block_table[seat, column] = block`."""

    seat: int
    column: int
    block: int


class SeatMask(NamedTuple):
    """The tokens that a seat may choose in this step."""

    seat: int
    allowed: bytes
    """One bit per token of the vocabulary: token t is bit t % 8, from the lowest, of byte t // 8."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step. Its parts apply in the order of the fields. Computing the chunks again gives the same result."""

    number: int
    openings: tuple[Opening, ...]
    table: tuple[TableEntry, ...]
    cleared: tuple[int, ...]
    """Blocks to set to zero."""
    copies: tuple[tuple[int, int], ...]
    """(source, target) blocks, all read before any is written."""
    seats: tuple[int, ...]
    """One per chunk, as `starts`, `lengths` and `scored`."""
    starts: tuple[int, ...]
    """Tokens of each chunk's seat that are in the cache already."""
    lengths: tuple[int, ...]
    scored: tuple[int, ...]
    """Number of leading positions of the chunk at which to score the prompt token that follows."""
    sample_chunks: tuple[int, ...]
    """One per token to sample: the chunk whose last position gives the logits."""
    sample_seats: tuple[int, ...]
    """The seat whose sampling values apply and that receives the token."""
    masks: tuple[SeatMask, ...] = ()
    """Of the seats among `sample_seats` that may not choose every token."""

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def undone_copies(self) -> tuple[TableEntry, ...]:
        """Table entries from before this step's copies, for computing an earlier step again."""
        sources = {target: source for source, target in self.copies}
        return tuple(entry._replace(block=sources[entry.block]) for entry in self.table if entry.block in sources)

    def only(self, chunks: Sequence[int], samples: Sequence[int]) -> StepInput:
        """The sub-step with only these chunks and samples, for a retry.

        Seats are open and blocks copied already; the caller supplies the block-table entries.
        """
        return replace(self.part(chunks, samples), openings=(), cleared=(), copies=())

    def part(self, chunks: Sequence[int], samples: Sequence[int]) -> StepInput:
        """The step with only these chunks and samples."""
        place = {chunk: new for new, chunk in enumerate(chunks)}
        return replace(
            self,
            seats=tuple(self.seats[chunk] for chunk in chunks),
            starts=tuple(self.starts[chunk] for chunk in chunks),
            lengths=tuple(self.lengths[chunk] for chunk in chunks),
            scored=tuple(self.scored[chunk] for chunk in chunks),
            sample_chunks=tuple(place[self.sample_chunks[sample]] for sample in samples),
            sample_seats=tuple(self.sample_seats[sample] for sample in samples),
        )


@dataclass(frozen=True, slots=True)
class StepTrace:
    """The way a step was computed, for a time line."""

    way: str
    """`graph`; `captured`: kernels launched one by one, then captured; `padded` or `eager`: launched one by one."""
    padded_tokens: int
    """Rows of the pass, padding included."""
    padded_decodes: int
    device_ms: float
    """From the step's first kernel to the copies of its results; 0 on a CPU."""
    device_idle_ms: float
    """The device's pause before it; 0 on a CPU."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, from the raw logits."""

    logprob: float
    """Of the chosen token; in a prompt, of the token at this position."""
    top: tuple[tuple[int, float], ...]
    """The most probable (token, logprob), best first, as many as requested."""
    rank: int | None = None
    """Tokens that are at least as probable as the chosen one, itself included; None: not counted."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one step, on the host."""

    number: int
    tokens: tuple[int, ...]
    """One per sample."""
    valid: tuple[bool, ...]
    """One per sample; False where the logits were not finite, so the token is meaningless."""
    logprobs: tuple[TokenLogprobs | None, ...]
    """One per sample; None where the seat does not request them."""
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...]
    """One per chunk: `scored` entries, for the prompt tokens from `start + 1` on."""
