"""One tool call as models write it, `{"name": ..., "arguments": {...}}`, read character by character.

The name and the arguments are known before the call ends, so that they can be streamed. The text of the arguments is
kept as the model wrote it.

Pure; used by `tool_parser`.
"""

from __future__ import annotations

import json

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEY = "name"


class CallScanner:
    """Reads one call. After `broken` it is no call; after `done` it is complete."""

    def __init__(self, name: str | None = None) -> None:
        """`name`: of a call whose text is only the object of its arguments."""
        self.name: str | None = name
        self.text = ""
        """All characters that were read."""
        self.done = False
        self.broken = False
        self._only_arguments = name is not None
        self._arguments = ""
        self._sent = 0
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = None
        self._raw = ""
        """The key or value that is being read."""

    def add(self, character: str) -> None:
        """Read one character of a call that is neither done nor broken."""
        self.text += character
        if self._only_arguments:
            self._arguments += character
            self._follow(character)
            self.done = self._depth == 0 and not self._in_string
            self.broken = self.text[0] != "{"
        elif not self._in_string and self._depth <= 1:
            self._between(character)
        else:
            self._raw += character
            self._follow(character)
            self._keep_arguments()

    def new_arguments(self) -> str:
        """The text of the arguments that was not given out yet; empty while the name is not known."""
        if self.name is None:
            return ""
        new = self._arguments[self._sent :]
        self._sent = len(self._arguments)
        return new

    def _between(self, character: str) -> None:
        """A character outside of strings and of the values' own objects and lists."""
        if self._depth == 0:
            self.broken = character != "{"
            self._depth = 1
        elif character in ",}":
            self._end_value()
            self.done = character == "}" and not self.broken
            if self.done:
                self._complete()
        elif character == ":" and self._key is None:
            self._key = self._parsed()
            self._raw = ""
        elif not character.isspace():
            self._raw += character
            self._follow(character)
            self._keep_arguments()

    def _follow(self, character: str) -> None:
        """Follow strings, and how deep objects and lists stand in each other."""
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = not self._escaped and character == "\\"
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1

    def _keep_arguments(self) -> None:
        """Arguments that are an object are known as they arrive."""
        if self._key in ARGUMENT_KEYS and self._raw.startswith("{"):
            self._arguments = self._raw

    def _end_value(self) -> None:
        if self._key is None:
            self.broken = bool(self._raw)
            return
        key, self._key = self._key, None
        if key == NAME_KEY:
            self.name = self._parsed()
        elif key in ARGUMENT_KEYS and not self._arguments:
            self._arguments = self._whole_arguments()
        self._raw = ""

    def _whole_arguments(self) -> str:
        """Arguments that are no object: some models write their JSON as a string, or null."""
        try:
            value = json.loads(self._raw)
        except ValueError:
            self.broken = True
            return ""
        return value if isinstance(value, str) and value else "{}" if not value else json.dumps(value)

    def _complete(self) -> None:
        self.broken = self.name is None
        self.done = not self.broken
        self._arguments = self._arguments or "{}"

    def _parsed(self) -> str | None:
        """The text that was read as a JSON string."""
        try:
            value = json.loads(self._raw)
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.broken = True
            return None
        return value
