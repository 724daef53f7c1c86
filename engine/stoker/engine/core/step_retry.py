"""Retry of a failed step in halves, so that only the chunk at fault ends with an error.

A step that went well needs none of it: its output is its `StepOutcome`, and nothing is copied.

Called by the engine when a step fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from stoker.engine.core.request import State
from stoker.engine.core.schedule import Schedule
from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.executor import Executor, PendingOutput
from stoker.engine.execution.step import StepInput, StepOutput, TokenLogprobs


class StepPart(NamedTuple):
    """Those chunks and samples of a step that can still be computed."""

    chunks: list[int]
    samples: list[int]
    gone: frozenset[int]
    """Samples whose sequences no longer run, or did not when the step was submitted again."""


@dataclass
class SubmittedStep:
    """A step that the executor has and whose output has not been read."""

    schedule: Schedule
    step: StepInput
    pending: PendingOutput
    submitted_s: float = 0.0
    """When its computing could begin: for a step that was computed by `submit`, before that."""
    part: StepPart | None = None
    """What was submitted, where the step was submitted again without sequences that had stopped since."""

    @property
    def size(self) -> tuple[bool, int]:
        """Whether it has prompts, and its tokens."""
        return self.step.num_tokens > len(self.step.seats), self.step.num_tokens

    def outcome(self) -> StepOutcome:
        """Wait for the step. Raises whatever computing it raises."""
        output = self.pending.result()
        if self.part is None:
            return StepOutcome(output)
        partial = _PartialOutput.empty(self.step)
        partial.put(self.part.chunks, self.part.samples, output)
        return StepOutcome(partial.whole(self.step.number), gone=self.part.gone)


class StepOutcome(NamedTuple):
    """A step's output, perhaps put together from several attempts."""

    output: StepOutput
    errors: Mapping[int, str] = MappingProxyType({})
    """Reason by chunk that could not be computed; its numbers in `output` are placeholders."""
    gone: frozenset[int] = frozenset()
    """Samples whose sequences no longer run. Their numbers in `output` are placeholders."""


def _give_up_stopped(submitted: SubmittedStep) -> StepPart:
    """Await no tokens of sequences that were preempted or have ended, and return what is left of the step.

    One that was preempted samples its tokens again.
    """
    chunks, gone = submitted.schedule.chunks, set(submitted.part.gone if submitted.part is not None else ())
    for number, sequence in enumerate(sequence for chunk in chunks for sequence in chunk.samples):
        if sequence.state is not State.RUNNING:
            sequence.num_pending = 0
            gone.add(number)
    left = [place for place, chunk in enumerate(chunks) if chunk.is_current]
    samples = [sample for sample, chunk in enumerate(submitted.step.sample_chunks) if chunk in left]
    return StepPart(left, [sample for sample in samples if sample not in gone], frozenset(gone))


def retry_step(
    executor: Executor, failed: SubmittedStep, later: Collection[SubmittedStep], error: Exception
) -> StepOutcome:
    """Compute the failed step again in parts, then submit the later ones again: they read what it failed to write.

    A sequence that was preempted or has ended takes no part in any of them: its seat and blocks may be another's.

    Raises:
        ExecutorLost: nothing can be computed any more.
    """
    for submitted in later:
        with suppress(Exception):
            submitted.pending.result()
    steps = _repeatable([submitted.step for submitted in later])
    outcome = _Retry(executor, failed, _give_up_stopped(failed), steps).run(error)
    for submitted, step in zip(later, steps, strict=True):
        submitted.part = _give_up_stopped(submitted)
        submitted.pending = _submit_part(executor, step, submitted.part)
    return outcome


@dataclass
class _PartialOutput:
    """Numbers so far, with placeholders elsewhere, so that indices of later samples stay valid."""

    tokens: list[int]
    valid: list[bool]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[tuple[TokenLogprobs, ...]]
    errors: dict[int, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, step: StepInput) -> _PartialOutput:
        count = len(step.sample_seats)
        return cls([0] * count, [False] * count, [None] * count, [()] * len(step.seats))

    def put(self, chunks: list[int], samples: list[int], output: StepOutput) -> None:
        """Enter the output of these chunks and samples, which were computed on their own."""
        for place, sample in enumerate(samples):
            self.tokens[sample] = output.tokens[place]
            self.valid[sample] = output.valid[place]
            self.logprobs[sample] = output.logprobs[place]
        for place, chunk in enumerate(chunks):
            self.prompt_logprobs[chunk] = output.prompt_logprobs[place]

    def whole(self, number: int) -> StepOutput:
        return StepOutput(
            number, tuple(self.tokens), tuple(self.valid), tuple(self.logprobs), tuple(self.prompt_logprobs)
        )


def _repeatable(steps: Sequence[StepInput]) -> list[StepInput]:
    """Return these computed steps as they can be computed again: without copies of blocks that one of them has given to
    another sequence, which overwrote them. Their targets hold what is needed, and an earlier step may write to these.
    """
    given: set[int] = set()
    found = []
    for step in reversed(steps):
        given |= {entry.block for entry in step.table}
        done = {target for source, target in step.copies if source in given}
        copies = tuple(copy for copy in step.copies if copy[1] not in done)
        found.append(replace(step, copies=copies, cleared=tuple(block for block in step.cleared if block not in done)))
    return found[::-1]


def _submit_part(executor: Executor, step: StepInput, part: StepPart) -> PendingOutput:
    if part.chunks:
        return executor.submit(step.part(part.chunks, part.samples))
    nothing: Future[StepOutput] = Future()
    nothing.set_result(StepOutput(step.number, (), (), (), ()))
    return nothing


class _Retry:
    """The retry of one step."""

    def __init__(self, executor: Executor, failed: SubmittedStep, part: StepPart, later: Iterable[StepInput]) -> None:
        self.executor, self.part = executor, part
        self.whole = len(part.chunks) == len(failed.schedule.chunks)
        undone = tuple(entry for step in later for entry in step.undone_copies())
        self.step = replace(failed.step, table=undone)
        self.partial = _PartialOutput.empty(failed.step)

    def run(self, error: Exception) -> StepOutcome:
        self._compute(self.part.chunks, error if self.whole else None)
        return StepOutcome(self.partial.whole(self.step.number), self.partial.errors, self.part.gone)

    def _compute(self, chunks: list[int], error: Exception | None) -> None:
        """Compute these chunks: together, unless they have failed together with `error` before; else in halves."""
        if error is None and chunks:
            samples = [sample for sample in self.part.samples if self.step.sample_chunks[sample] in chunks]
            try:
                self.partial.put(chunks, samples, self.executor.submit(self.step.only(chunks, samples)).result())
                return
            except ExecutorLost:
                raise
            except Exception as again:  # noqa: BLE001 - whatever one request does to a step must not reach the others
                error = again
        if len(chunks) == 1 and error is not None:
            self.partial.errors[chunks[0]] = f"{type(error).__name__}: {error}"
        elif chunks:
            half = len(chunks) // 2
            self._compute(chunks[:half], None)
            self._compute(chunks[half:], None)
