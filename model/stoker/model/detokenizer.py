"""The text of one sequence as its tokens come, for the engine's front. No torch.

The library's stream decodes in a tenth of the time of two whole decodes for each token. Where it gives nothing for
long, or gives up, whole decodes help it on: their difference is what the tokens add to those before them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from stoker.model.tokenizer_limits import is_panic, panics_named

REPLACEMENT = "\ufffd"
"""The text that a part of a character decodes to."""
MAX_PENDING_TOKENS = 8
"""A character has at most 4 bytes, so what is still broken after so many tokens will stay so."""


class Detokenizer:
    """Text is held back while it ends within a character."""

    def __init__(
        self, backend: Any, prompt: Sequence[int], *, skip_special_tokens: bool, hidden: Collection[int] = ()
    ) -> None:
        """`backend`: the library's tokenizer. `prompt`: what the sequence continues. `hidden`: tokens without text."""
        self.backend, self.skip_special_tokens, self.hidden = backend, skip_special_tokens, hidden
        self.context = list(prompt[-MAX_PENDING_TOKENS:])
        """Tokens whose text was given out; they are decoded with the next, because some decoders drop a first blank."""
        self.pending: list[int] = []
        """Tokens behind them."""
        self._has_streams = True
        """Whether the library can stream this sequence: it expects each text to begin with the one before."""
        self._stream = self._open()

    def add(self, token: int) -> str:
        """Return the text that this token completes; empty while it is only a part of a character."""
        if token in self.hidden:
            return ""
        self.pending.append(token)
        text = self._step(token) if self._stream is not None else None
        if text is None:
            return self._add_whole()
        if text:
            self.context, self.pending = self.pending, []
            return text
        return self._add_whole() if len(self.pending) >= MAX_PENDING_TOKENS else ""

    def finish(self) -> str:
        """Return the rest at the end: a replacement character for an unfinished one."""
        return self._take(self._rest()) if self.pending else ""

    def _step(self, token: int) -> str | None:
        """What the library's stream gives for a token; None where it gives up, from then on."""
        assert self._stream is not None
        try:
            return self._stream.step(self.backend, token) or ""
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
        self._stream, self._has_streams = None, False
        return None

    def _add_whole(self) -> str:
        """Return what the pending tokens add, by whole decodes, where it ends with a character or stays broken."""
        text = self._rest()
        is_part = not text or text.endswith(REPLACEMENT)
        return "" if is_part and len(self.pending) < MAX_PENDING_TOKENS else self._take(text)

    def _take(self, text: str) -> str:
        """Give out the text of the pending tokens, and begin a new stream behind them."""
        self.context, self.pending = self.pending if text else self.context, []
        self._stream = self._open()
        return text

    def _rest(self) -> str:
        """What the pending tokens add to the context."""
        return self._decode([*self.context, *self.pending])[len(self._decode(self.context)) :]

    def _open(self) -> DecodeStream | None:
        """A stream behind the context; None behind a part of a character, which it would give out once more."""
        if not self._has_streams or (self.context and self._decode(self.context).endswith(REPLACEMENT)):
            return None
        return DecodeStream(ids=self.context, skip_special_tokens=self.skip_special_tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        with panics_named():
            text: str = self.backend.decode(tokens, skip_special_tokens=self.skip_special_tokens)
        return text
