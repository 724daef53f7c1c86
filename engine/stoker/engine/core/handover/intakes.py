"""The intakes of all requests whose blocks arrive, with those whose request went while a device still copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.engine.transfer.intake import Announcement, Intake, Taken
from stoker.engine.transfer.zone_memory import LockedZone


class Intakes:
    """Intakes by the dispatch's id."""

    def __init__(self, zone: LockedZone) -> None:
        self._zone = zone
        self._open: dict[str, Intake] = {}
        self._left: list[Intake] = []
        """Of requests that are over, until their last copies have ended."""

    @property
    def busy(self) -> bool:
        """Whether copies are under way."""
        return bool(self._left) or any(intake.copying for intake in self._open.values())

    def open(self, name: str, intake: Intake) -> None:
        self._open[name] = intake

    def close(self, name: str) -> None:
        """The request is over. Harmless for one without an intake."""
        intake = self._open.pop(name, None)
        if intake is not None and intake.copying:
            self._left.append(intake)

    def take(self, name: str, announced: Sequence[Announcement], now_s: float) -> Taken:
        with self._zone.lock:
            return self._open[name].take(announced, now_s)

    def settled(self, now_s: float) -> Iterator[tuple[str, Taken]]:
        """What has been copied since the last call. An intake may be closed meanwhile."""
        with self._zone.lock:
            for intake in self._left:
                intake.settled(now_s)
        self._left = [intake for intake in self._left if intake.copying]
        for name, intake in list(self._open.items()):
            if intake.copying and name in self._open:
                with self._zone.lock:
                    taken = intake.settled(now_s)
                if taken.sound or taken.again or taken.lost:
                    yield name, taken
