"""Retry of a failed step in halves, so that only the chunk at fault ends with an error.

A step that went well needs none of it: its output is its `StepOutcome`, and nothing is copied.

Called by the engine when a step fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from stoker.engine.core.request import State
from stoker.engine.core.schedule import Schedule
from stoker.engine.errors import ExecutorLost
from stoker.engine.execution.executor import Executor, PendingOutput
from stoker.engine.execution.step import StepInput, StepOutput, TokenLogprobs


@dataclass
class SubmittedStep:
    """A step that the executor has and whose output has not been read."""

    schedule: Schedule
    step: StepInput
    pending: PendingOutput
    submitted_s: float = 0.0
    """When its computing could begin: for a step that was computed by `submit`, before that."""

    @property
    def size(self) -> tuple[bool, int]:
        """Whether it has prompts, and its tokens."""
        return self.step.num_tokens > len(self.step.seats), self.step.num_tokens


class StepOutcome(NamedTuple):
    """A step's output, perhaps put together from several attempts."""

    output: StepOutput
    errors: Mapping[int, str] = MappingProxyType({})
    """Reason by chunk that could not be computed; its numbers in `output` are placeholders."""
    gone: frozenset[int] = frozenset()
    """Samples whose sequences no longer run. Their numbers in `output` are placeholders."""


def retry_step(
    executor: Executor, failed: SubmittedStep, later: Iterable[SubmittedStep], error: Exception
) -> StepOutcome:
    """Compute the failed step again in parts, then submit the later ones again: they read what it failed to write.

    Raises:
        ExecutorLost: nothing can be computed any more.
    """
    for submitted in later:
        with suppress(Exception):
            submitted.pending.result()
    outcome = _Retry(executor, failed, later).run(error)
    for submitted in later:
        submitted.pending = executor.submit(submitted.step)
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


class _Retry:
    """The retry of one step. Only sequences that still run take part: others may have lost their seats and blocks."""

    def __init__(self, executor: Executor, failed: SubmittedStep, later: Iterable[SubmittedStep]) -> None:
        self.executor = executor
        self.chunks = failed.schedule.chunks
        undone = tuple(entry for submitted in later for entry in submitted.step.undone_copies())
        self.step = replace(failed.step, table=undone)
        self.partial = _PartialOutput.empty(failed.step)
        self.gone = frozenset(self._give_up_samples())

    def run(self, error: Exception) -> StepOutcome:
        running = (index for index, chunk in enumerate(self.chunks) if chunk.sequence.state is State.RUNNING)
        alive = [index for index in running if not self.chunks[index].is_outdated]
        self._compute(alive, error if len(alive) == len(self.chunks) else None)
        return StepOutcome(self.partial.whole(self.step.number), self.partial.errors, self.gone)

    def _give_up_samples(self) -> Iterable[int]:
        """Drop samples of sequences that no longer run. One that was preempted samples its token again."""
        for number, sequence in enumerate(sequence for chunk in self.chunks for sequence in chunk.samples):
            if sequence.state is not State.RUNNING:
                sequence.num_pending = 0
                yield number

    def _compute(self, chunks: list[int], error: Exception | None) -> None:
        """Compute these chunks: together, unless they have failed together with `error` before; else in halves."""
        if error is None and chunks:
            samples = [sample for sample, chunk in enumerate(self.step.sample_chunks) if chunk in chunks]
            samples = [sample for sample in samples if sample not in self.gone]
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
