"""Steps in flight: which sequences may take part in the next one while others are in a pipeline's stages. Pure.

A decode needs the token that the step before sampled for its sequence, and that token leaves the last stage. So the
sequences that decode are dealt out over as many steps as there are stages, about equally many to each, and one of them
returns when its step has left the pipeline. Chunks of one prompt need no token: they may follow each other in
neighbouring steps. With fewer sequences than stages there are as many steps in flight as sequences.

Over any run of as many steps as stages each of D decoding sequences takes part at most once, and these steps have room
for D together. So a sequence that is left out leaves room that only it can fill: none is left out for long.

One engine without a pipeline is the case of one stage: every sequence may take part in every step.

Owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable

from stoker.engine.core.request import Sequence

CHUNK_TOKENS = 2048
"""Default for the tokens of one prompt in a step over several stages: its next part follows while this one is in the
later stages."""


class StepFlight:
    """Counts steps, and remembers on each sequence the last one that sampled for it."""

    def __init__(self, stages: int = 1, *, overlap: bool = False) -> None:
        """`overlap`: one more step may be submitted before the oldest one's tokens are known on the host."""
        self.stages, self.overlap = stages, overlap
        self.step = 0
        """Number of the step to schedule next."""

    def chunk_tokens(self, configured: int | None) -> int | None:
        """Tokens of one prompt in a step; None: as many as fit."""
        return CHUNK_TOKENS if configured is None and self.stages > 1 else configured

    def begin(self) -> None:
        """Note that a step was scheduled."""
        self.step += 1

    def sampled(self, sequence: Sequence) -> None:
        """Note that the step to schedule samples a token of the sequence."""
        sequence.last_step = self.step

    def able(self, running: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """Return the sequences that may advance, and by how many tokens at most: those that decode first."""
        missing = [(sequence, sequence.missing) for sequence in running]
        decodes = [one for one in missing if one[1] == 1]
        if self.stages > 1:
            decodes = self._dealt(decodes, sum(1 for sequence, _ in missing if sequence.decodes))
        return decodes + [one for one in missing if one[1] > 1]

    def _dealt(self, decodes: list[tuple[Sequence, int]], total: int) -> list[tuple[Sequence, int]]:
        """Return this step's share of the decodes; `total` counts those of all steps in flight, too."""
        steps = min(self.stages, max(total, 1))
        share = -(-total // steps)
        back = [one for one in decodes if self._is_back(one[0], steps)]
        return back[: max(share, 1)]

    def _is_back(self, sequence: Sequence, steps: int) -> bool:
        """Whether the step that sampled the sequence's last token will have left the pipeline."""
        if not sequence.num_pending:
            return True
        return sequence.num_pending <= self.overlap and sequence.last_step <= self.step - steps
