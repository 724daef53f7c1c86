"""The text of output tokens: detokenised as they arrive, and cut at stop texts. Used by fronts and by `LLM`.

Stop texts are found here because the core has only tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Detokenizer(Protocol):
    """Turns one sequence of tokens into text, piece by piece."""

    def add(self, token: int) -> str:
        """Return the text that this token completes; empty while it is only a part of a character."""
        ...

    def finish(self) -> str:
        """Return the rest at the end: a replacement character for an unfinished one."""
        ...


@dataclass(frozen=True)
class Piece:
    """The text that some tokens added."""

    text: str
    num_tokens: int
    """Number of tokens that count: those after a stop text do not."""
    offsets: tuple[int, ...]
    """Begin of each counted token's text, in characters of the choice's whole text before any cut."""
    stop: str | None = None
    """The stop text that was found, after which no text may follow."""

    @property
    def stopped(self) -> bool:
        return self.stop is not None


class StopTexts:
    """Cuts a growing text at the first stop text. Text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self.stops = tuple(stops)
        self.include = include
        self._held = ""
        self._longest = max((len(stop) for stop in self.stops), default=0)

    def add(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to show, and the stop text that was found (the rest is dropped)."""
        if not self.stops:
            return text, None
        held = self._held + text
        found = [(held.find(stop), -len(stop), stop) for stop in self.stops if stop in held]
        if found:
            begin, _, stop = min(found)
            self._held = ""
            return held[: begin + len(stop)] if self.include else held[:begin], stop
        keep = self._longest_beginning(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def finish(self) -> str:
        """Return the text that was held back, at the end."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop text begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self.stops):
                return length
        return 0


class OutputText:
    """The text of one choice. Stop texts count only after `min_tokens` tokens."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopTexts(stops, include=include_stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0
        self.num_characters = 0
        """Length of the text before any cut; the next token's offset."""

    def add(self, tokens: Sequence[int]) -> Piece:
        """Add tokens and return their text; tokens after a stop text are left out."""
        text, offsets = "", []
        for token in tokens:
            offsets.append(self.num_characters)
            self.num_tokens += 1
            new = self._detokenizer.add(token)
            self.num_characters += len(new)
            if self.num_tokens <= self._min_tokens:
                text += new
                continue
            shown, stop = self._stops.add(new)
            text += shown
            if stop is not None:
                return Piece(text, len(offsets), tuple(offsets), stop)
        return Piece(text, len(offsets), tuple(offsets))

    def finish(self) -> Piece:
        """End a choice that no stop text ended; return the text that was held back or unfinished."""
        rest = self._detokenizer.finish()
        self.num_characters += len(rest)
        shown, stop = self._stops.add(rest)
        return Piece(shown if stop is not None else shown + self._stops.finish(), 0, (), stop)


class TextCodec(Protocol):
    """The part of a tokenizer that a front uses. Methods are called from several threads."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def template_source(self) -> str | None:
        """The chat template's text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def detokenizer(self, *, skip_special_tokens: bool, prompt: Sequence[int] = ()) -> Detokenizer:
        """Make a detokenizer for text that continues `prompt`: some tokenizers drop the blank before a first word."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character and no valid UTF-8."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """Render the prompt of a conversation; `settings` are further variables of the template.

        Raises:
            ValueError: the template refuses these messages, with its reason.
        """
        ...
