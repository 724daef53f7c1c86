"""The agent's output for people: one live line on a terminal, plain lines in a log.

Made by `program`, called by the agent at each event. It shows state and changes none.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from stoker.pod.termination_message import TerminationMessage
from stoker.trainer.protocol.messages import (
    Event,
    PhaseEvent,
    PlanEvent,
    RetentionEvent,
    SaveEvent,
    StepEvent,
    StragglersEvent,
    ValidationEvent,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class RunOutput(io.FileIO):
    """Standard output of a run. The run goes on without it: after a reader that leaves, and while a disk is full."""

    def __init__(self, descriptor: int, complaints: TextIO) -> None:
        """`complaints`: where the first loss is told."""
        super().__init__(descriptor, "wb", closefd=False)
        self._complaints, self._is_complete = complaints, True

    def write(self, content: ReadableBuffer, /) -> int:
        """Write what there is room for. The next lines are tried, too: a disk may have room again."""
        try:
            return super().write(content)
        except BrokenPipeError:
            pass  # `stoker train ... | head` is no fault
        except OSError as error:
            if self._is_complete:
                self._complaints.write(f"standard output: {error.strerror}; the run goes on, its log lacks lines\n")
            self._is_complete = False
        return memoryview(content).nbytes


def run_output(stream: TextIO, complaints: TextIO) -> TextIO:
    """Return the run's output: the file of `stream`, in its encoding."""
    raw = RunOutput(stream.fileno(), complaints)
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)  # the screen joins its lines


class Console:
    """Prints the events of the pod's first rank, and the log lines of all ranks."""

    def __init__(self, screen: RichConsole, every_steps: int) -> None:
        self._screen, self._every_steps = screen, every_steps
        self._live = (
            Live(Text("Starting"), console=screen, auto_refresh=False, transient=True) if screen.is_terminal else None
        )
        self._last_phase = ""
        if self._live is not None:
            self._live.start()

    def show(self, event: Event) -> None:
        match event:
            case StepEvent():
                self._show_step(event)
            case PhaseEvent():
                self._show_phase(event)
            case ValidationEvent():
                self.line(f"step {event.step}  validation loss {event.loss:.4f}")
            case PlanEvent():
                self.line(event.line)
            case StragglersEvent():
                self.line(stragglers_line(event))
            case SaveEvent():
                self.line(_save_line(event))
            case RetentionEvent():
                for problem in event.problems:
                    self.line(f"not deleted, tried again after the next save: {problem}")

    def line(self, text: str) -> None:
        self._screen.print(Text(text), soft_wrap=True)

    def rank_line(self, rank: int, text: str) -> None:
        self.line(f"[rank {rank}] {text}")

    def close(self, message: TerminationMessage | None) -> None:
        if self._live is not None:
            self._live.stop()
        if message is None:
            return
        where = f" at step {message.step}" if message.step is not None else ""
        self.line(f"{message.cause.value}{where}{': ' + message.detail if message.detail else ''}")

    def _show_step(self, event: StepEvent) -> None:
        text = step_line(event)
        if self._live is not None:
            self._live.update(Text(text), refresh=True)
        elif event.step % self._every_steps == 0 or event.step == event.total_steps:
            self.line(text)

    def _show_phase(self, event: PhaseEvent) -> None:
        text = f"{event.phase}  {event.message}".rstrip()
        if event.phase == "Training":  # followed by step lines
            return
        if self._live is not None:
            self._live.update(Text(text), refresh=True)
        elif text != self._last_phase:
            self.line(text)
        self._last_phase = text


def step_line(event: StepEvent) -> str:
    """One line about a step: `step 7/60  loss 2.5000  lr 3.0e-04  norm 0.90  310 tokens/s  ETA 2m10s`"""
    norm = "overflow, skipped" if event.grad_norm is None else f"{event.grad_norm:.2f}"
    return (
        f"step {event.step}/{event.total_steps}  loss {event.loss:.4f}  "
        f"lr {event.learning_rate:.1e}  norm {norm}  "
        f"{event.tokens_per_s:,.0f} tokens/s  ETA {duration(event.eta_s)}"
    )


def stragglers_line(event: StragglersEvent) -> str:
    """One line about the ranks that the others wait for: `stragglers: rank 3 computes 0.90 s a step, others 0.50 s`"""
    if not event.stragglers:
        return "no straggler any more"
    parts = (
        f"rank {found['rank']} computes {found['busy_s']:.3g} s a step, others {found['typical_s']:.3g} s"
        for found in event.stragglers
    )
    return f"stragglers: {'; '.join(parts)}"


def duration(seconds: float) -> str:
    """A duration for people: `45s`, `2m10s`, `3h05m`, `2d04h`."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02}h"


def _save_line(event: SaveEvent) -> str:
    outcome = {None: "", True: ", verified", False: ", NOT verified"}[event.verified]
    detail = f": {event.detail}" if event.detail else ""
    return f"step {event.step}  save {event.folder} {event.state.lower()}{outcome}{detail}"
