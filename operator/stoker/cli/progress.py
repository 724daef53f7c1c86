"""Follow objects until they have settled: a live table on a terminal, one line per change in a log.

Read-only: it polls the supervisor. Called by `local`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from stoker.cli.event_time import time_of
from stoker.cli.follow_scope import EventScope, Name, belongs, name_of
from stoker.cli.printers import FOLLOWED, progress_line, state_of, value_at
from stoker.cli.question import Ask, ask_once

LOOK_S = 0.5
QUIET_S = 5.0
"""Shortest time between two lines of a log about an object of which only numbers change."""
PROBES_OF_STARTS = ("Startup probe", "Readiness probe")
"""Beginnings of warnings that every pod has while it starts or ends; its object's line says what it waits for."""
STALLED_S = 5.0
"""Time for which an object must be stalled before it counts as failed: a cause may vanish while others are applied."""


class ObjectsClient(Protocol):
    """A cluster as `Follower` asks it: the supervisor, or an API server."""

    @property
    def problems(self) -> list[str]: ...

    def objects(self, kind: str) -> list[dict[str, Any]]: ...


class Screen(Protocol):
    """The place where progress is shown."""

    def show(self, objects: Iterable[Mapping[str, Any]]) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


@dataclass
class Follower:
    """Polls one cluster twice a second."""

    client: ObjectsClient
    screen: Screen
    wanted: Collection[Name]
    """Objects that must settle."""
    since: str = ""
    """Warnings from before this time (as Kubernetes writes it) are not shown."""
    scope: EventScope | None = None
    """Given: nothing else is shown than the wanted objects, what belongs to them and their warnings."""
    ask: Ask = ask_once
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    _bad_since: dict[Name, float] = field(default_factory=dict)
    _events: set[str] = field(default_factory=set)
    _problems: set[str] = field(default_factory=set)

    def until_settled(self, timeout_s: float | None = None) -> bool | None:
        """Wait; True when everything wanted is good, False when something is bad, None when the time is over."""
        end = None if timeout_s is None else self.monotonic() + timeout_s
        while True:
            found = self.ask(self.look)
            outcome = None if found is None else self._outcome(found)
            if outcome is not None or (end is not None and self.monotonic() > end):
                return outcome
            self.sleep(LOOK_S)

    def for_ever(self) -> None:
        """Show progress until Ctrl-C."""
        while True:
            self.look()
            self.sleep(LOOK_S)

    def look(self) -> dict[Name, Mapping[str, Any]]:
        """Fetch the objects once and show them."""
        found: dict[Name, Mapping[str, Any]] = {
            name_of(item): item
            for kind in FOLLOWED
            for item in self.client.objects(kind)
            if self.scope is None or belongs(item, self.wanted)
        }
        self.screen.show(found.values())
        for problem in self.client.problems:
            if problem not in self._problems:
                self.screen.say(f"warning: {problem}")
        self._problems = set(self.client.problems)
        for event in self.client.objects("Event"):
            if self._is_new(event) and (self.scope is None or self.scope.covers(event, found)):
                self._events.add(event["metadata"]["uid"])
                about, reason = event["involvedObject"], event["reason"]
                text = event["message"].removeprefix(f"{reason}: ")  # of an attempt's end, which names its cause
                self.screen.say(f"warning: {about['kind']} {about['name']}: {reason}: {text}")
        return found

    def _is_new(self, event: Mapping[str, Any]) -> bool:
        """Whether an event is a warning from after the beginning that was not shown."""
        recent = time_of(event) >= self.since.removesuffix("Z")
        return _is_warning(event) and recent and event["metadata"]["uid"] not in self._events

    def _outcome(self, found: Mapping[Name, Mapping[str, Any]]) -> bool | None:
        states = [self._settled(name, found.get(name)) for name in self.wanted]
        if False in states:
            return False
        return True if all(states) else None

    def _settled(self, name: Name, item: Mapping[str, Any] | None) -> bool | None:
        state = state_of(item) if item is not None else "bad"
        if state != "bad":
            self._bad_since.pop(name, None)
            return True if state == "good" else None
        since = self._bad_since.setdefault(name, self.monotonic())
        return False if self.monotonic() - since >= STALLED_S or _ended(item) else None


class Lines:
    """Plain lines for a log: one for each change of phase, numbers now and then."""

    def __init__(self, write: Callable[[str], None], monotonic: Callable[[], float] = time.monotonic) -> None:
        self.write = write
        self.monotonic = monotonic
        self._said: dict[Name, tuple[str, str, float]] = {}

    def show(self, objects: Iterable[Mapping[str, Any]]) -> None:
        for found in objects:
            name, phase, line = name_of(found), value_at(found, "status.phase"), progress_line(found)
            old_phase, old_line, at = self._said.get(name, ("", "", -QUIET_S))
            due = line != old_line and self.monotonic() - at >= QUIET_S
            if phase and (phase != old_phase or due):
                self._said[name] = (phase, line, self.monotonic())
                self.say(f"{name.kind.lower()}/{name.name}  {phase}  {line}".rstrip())

    def say(self, text: str) -> None:
        self.write(f"{datetime.now():%H:%M:%S} {text}")

    def close(self) -> None:
        """Do nothing: no terminal is held."""


class JsonLines:
    """One JSON object per change, for programs."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.write = write
        self._said: dict[Name, str] = {}

    def show(self, objects: Iterable[Mapping[str, Any]]) -> None:
        for found in objects:
            name = name_of(found)
            line = json.dumps({**name._asdict(), "status": _figures(found.get("status") or {})}, sort_keys=True)
            if self._said.get(name) != line:
                self._said[name] = line
                self.write(line)

    def say(self, text: str) -> None:
        self.write(json.dumps({"text": text}))

    def close(self) -> None:
        """Do nothing: no terminal is held."""


class Table:
    """A table on a terminal, redrawn at each change."""

    def __init__(self) -> None:
        from rich.live import Live  # rich costs a tenth of a second: only where it is seen

        self._live = Live(refresh_per_second=4, transient=False)
        self._live.start()

    def show(self, objects: Iterable[Mapping[str, Any]]) -> None:
        from rich.table import Table as RichTable

        table = RichTable(box=None, pad_edge=False, header_style="dim")
        for column in ("", "", "phase"):
            table.add_column(column, no_wrap=True)
        table.add_column("", overflow="fold")
        for found in objects:
            state = state_of(found)
            mark = {"good": "[green]✓[/]", "bad": "[red]✗[/]"}.get(state, "[cyan]…[/]")
            name = f"{found['kind'].lower()}/{found['metadata']['name']}"
            phase = value_at(found, "status.phase")
            table.add_row(mark, name, phase, f"{_bar(found)}{_escaped(progress_line(found))}")
        self._live.update(table)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def screen_for(*, as_json: bool) -> Screen:
    """Choose the screen that fits standard output."""
    if as_json:
        return JsonLines(_print)
    return Table() if sys.stdout.isatty() else Lines(_print)


def _print(text: str) -> None:
    print(text, flush=True)


def _is_warning(event: Mapping[str, Any]) -> bool:
    of_start = event["reason"] == "Unhealthy" and event["message"].startswith(PROBES_OF_STARTS)
    return event["type"] == "Warning" and not of_start


def _ended(item: Mapping[str, Any] | None) -> bool:
    """Whether an object is bad for good (failed or deleted), not only stalled."""
    if item is None:
        return True
    return bool(state_of({**item, "status": {**item["status"], "conditions": []}}) == "bad")


def _figures(status: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in status.items() if name not in ("pinned", "conditions", "attempts")}


def _bar(found: Mapping[str, Any]) -> str:
    step, of = value_at(found, "status.progress.step"), value_at(found, "status.progress.totalSteps")
    if not step or not of or not int(of):
        return ""
    full = round(16 * min(1.0, int(step) / int(of)))
    return f"[green]{'━' * full}[/][dim]{'━' * (16 - full)}[/] "


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")
