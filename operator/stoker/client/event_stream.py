"""Server-sent events, from the lines of an answer. Pure."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One event; its data is a JSON object."""

    name: str
    data: dict[str, Any]
    number: str = ""
    """Its id: where a watch goes on."""


class EventLines:
    """Lines on their way to events. A comment, which shows that a silent stream is alive, is none."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}

    def take(self, line: str) -> Event | None:
        """Return the event that a line ends."""
        if line:
            name, _, value = line.partition(":")
            self._fields[name] = value.removeprefix(" ")
            return None
        fields, self._fields = self._fields, {}
        if "data" not in fields:
            return None
        return Event(fields.get("event", ""), json.loads(fields["data"]), fields.get("id", ""))
