"""Waiting in a story, the same for every kind of cluster."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from testing.stories.object_views import Object, ObjectViews

TIMEOUT_S = 480.0
"""Long enough for a machine on which other work runs; a wait ends as soon as its state is there."""


class Waits(ObjectViews):
    """Waits for a state of the views; each ends in time, or fails with the current state."""

    PAUSE_S: ClassVar[float] = 0.05
    """Pause between two polls."""

    @abstractmethod
    def picture(self, kind: str = "", name: str = "") -> str:
        """Return the state to print when a story makes no progress."""

    def wait(
        self, kind: str, name: str, holds: Callable[[Object], Any], what: str, timeout_s: float = TIMEOUT_S
    ) -> Object:
        """Wait until `holds` is true of an object and return the object.

        Raises:
            AssertionError: it was not in time; the message has the object, its events and the ends of the pods' logs.
        """
        deadline = time.monotonic() + timeout_s
        while (found := self.find(kind, name)) is None or not holds(found):
            assert time.monotonic() < deadline, (
                f"{kind} {name}: not {what} after {timeout_s:g} s\n{self.picture(kind, name)}"
            )
            time.sleep(self.PAUSE_S)
        return found

    def wait_for_phase(self, kind: str, name: str, *phases: str, timeout_s: float = TIMEOUT_S) -> Object:
        """Wait for a phase; for that of a completed job until its last save is known as verified, a moment later."""
        wanted = " or ".join(phases)
        return self.wait(
            kind, name, lambda found: phase(found) in phases and _last_save_is_known(found), wanted, timeout_s
        )

    def wait_until_gone(self, kind: str, name: str, timeout_s: float = TIMEOUT_S) -> None:
        self.wait_until(lambda: self.find(kind, name) is None, f"{kind} {name} gone", timeout_s)

    def wait_for_event(self, kind: str, name: str, reason: str) -> list[str]:
        """Wait for an event, which the operator writes after the status, and return the messages of its reason."""
        self.wait_until(lambda: reason in self.events(kind, name), f"{reason} told about {kind} {name}")
        return self.events(kind, name)[reason]

    def wait_until(self, holds: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline, f"not {what} after {timeout_s:g} s\n{self.picture()}"
            time.sleep(self.PAUSE_S)


def _last_save_is_known(found: Mapping[str, Any]) -> bool:
    """Whether the Checkpoint of a completed job's last step is verified; true of everything else."""
    if found["kind"] != "TrainingJob" or phase(found) != "Completed":
        return True
    status = found["status"]
    last = (status.get("progress") or {}).get("totalSteps") or 0
    return bool(((status.get("newestVerifiedCheckpoint") or {}).get("step") or 0) >= last)


def phase(found: Mapping[str, Any]) -> str:
    return str((found.get("status") or {}).get("phase", ""))
