"""Tool calls and reasoning in a model's text, found as the text arrives.

A parser turns pieces of text into parts: content, reasoning, the begin of a call, more of its arguments. A whole answer
is read by the same parser, so it equals a streamed one. What looks like a call and is none stays content.

Pure; used by `chat`. The formats are those of published chat templates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from stoker.engine.http.openai.call_scanner import CallScanner
from stoker.engine.output_grammar import BEGIN_OF_REASONING, END_OF_REASONING

ToolParserName = Literal["hermes", "llama3_json", "mistral"]


@dataclass(frozen=True)
class Part:
    """New text of a choice."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    """For `call` the function's name."""
    call: int = 0
    """Number of the call, from 0."""


@dataclass(frozen=True)
class CallFormat:
    """How a model writes its calls."""

    begins: tuple[str, ...] = ()
    """Markers before the first call."""
    ends: tuple[str, ...] = ()
    """Markers behind a call."""
    fillers: str = ""
    """Characters between calls."""
    bare: bool = False
    """An answer that begins with `{` is a call."""
    named: bool = False
    """A call may be the function's name and the object of its arguments."""
    special: bool = False
    """The markers are special tokens, which the text must keep."""


FORMATS: dict[ToolParserName, CallFormat] = {
    "hermes": CallFormat(begins=("<tool_call>",), ends=("</tool_call>",)),
    "llama3_json": CallFormat(begins=("<|python_tag|>",), fillers=";,", bare=True, special=True),
    "mistral": CallFormat(begins=("[TOOL_CALLS]",), fillers="[],", named=True, special=True),
}
LISTED = CallFormat(fillers="[],")
"""The form of calls that a request forces: a JSON list."""
ARGS_MARKERS = ("[ARGS]", "[CALL_ID]")


def detected_format(template: str | None) -> ToolParserName | None:
    """The format of calls that a chat template writes, by its markers."""
    if template is None:
        return None
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return "llama3_json"
    return None


class ToolCallParser:
    """Finds the calls in one choice's text."""

    def __init__(
        self,
        form: CallFormat,
        *,
        forced: bool = False,
        name: str | None = None,
        most: int | None = None,
        names: Collection[str] | None = None,
        functions: Collection[str] | None = None,
    ) -> None:
        """`forced`: the whole text is calls; `name`: of the one call whose arguments are the whole text; `most`: calls
        that are given out, the others are dropped; `names`: those of calls, what names another function is content;
        `functions`: the same for calls without a marker, which other JSON can look like."""
        self.form, self.most, self.names, self.functions = form, most, names, functions
        self.num_calls = 0
        self._held = ""
        self._begun = False
        """Whether anything but blanks has come."""
        self._blanks = ""
        """Blanks that are content only if content follows."""
        self._marker = ""
        self._call: CallScanner | None = CallScanner(name) if name is not None else None
        self._announced = False
        self._between = forced and name is None

    def add(self, text: str) -> list[Part]:
        """The parts that this text completes."""
        self._held += text
        return list(self._read(last=False))

    def finish(self) -> list[Part]:
        """The rest, at the end of the text. A call whose name was not complete is content."""
        parts = list(self._read(last=True))
        if self._call is not None and not self._announced:
            parts += self._content(self._marker + self._call.text)
            self._call = None
        if self._blanks and not self.num_calls:
            parts.append(Part("content", self._blanks))
        return parts

    def _read(self, *, last: bool) -> Iterator[Part]:
        """Read what is held until more text is needed."""
        while self._held:
            before = (self._held, self._between, self._call)
            if self._call is not None:
                yield from self._read_call(self._call)
            elif self._between:
                yield from self._read_between(last=last)
            else:
                yield from self._read_text(last=last)
            if before == (self._held, self._between, self._call):
                return

    # Content.

    def _read_text(self, *, last: bool) -> Iterator[Part]:
        """Content, up to the marker of a call."""
        if self.form.bare and not self._begun:
            self._held = self._held.lstrip()
            if self._held.startswith("{"):
                self._begin_call("")
                return
        places = [(self._held.find(marker), marker) for marker in self.form.begins if marker in self._held]
        if places:
            place, self._marker = min(places)
            text, self._held = self._held[:place], self._held[place + len(self._marker) :]
            self._between = True
            yield from self._content(text)
            return
        keep = 0 if last else partial(self._held, self.form.begins)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        yield from self._content(text)

    def _content(self, text: str) -> list[Part]:
        """Content, with the blanks before it. Blanks at its end wait for what follows."""
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        self._begun = self._begun or bool(shown)
        return [Part("content", shown)] if shown else []

    # Calls.

    def _read_between(self, *, last: bool) -> Iterator[Part]:
        """Skip what stands before, between and behind calls."""
        held = self._held.lstrip()
        while held and held[0] in self.form.fillers and not self._may_begin(held, last=last):
            held = held[1:].lstrip()
        self._held = held
        markers = (*self.form.ends, *self.form.begins)
        found = next((marker for marker in markers if held.startswith(marker)), None)
        if found is not None:
            self._held = held[len(found) :]
            self._between = found in self.form.begins
            self._blanks = ""
        elif held.startswith("{"):
            self._begin_call(self._marker)
        elif held and (last or partial(held, markers) < len(held)):
            yield from self._read_name(last=last)

    def _may_begin(self, held: str, *, last: bool) -> bool:
        """Whether a marker begins here, or could when more text comes."""
        return any(held.startswith(marker) or (not last and marker.startswith(held)) for marker in self.form.begins)

    def _read_name(self, *, last: bool) -> Iterator[Part]:
        """A call that begins with its name; anything else is content again."""
        name, brace, _ = self._held.partition("{")
        if self.form.named and brace:
            for marker in ARGS_MARKERS:
                name = name.partition(marker)[0]
            self._held = self._held[self._held.index("{") :]
            self._begin_call(self._marker, name.strip())
        elif not self.form.named or last:
            self._between = False
            yield from self._content("" if self.num_calls else self._marker)

    def _begin_call(self, marker: str, name: str | None = None) -> None:
        self._call, self._announced, self._marker, self._begun = CallScanner(name), False, marker, True

    def _read_call(self, call: CallScanner) -> Iterator[Part]:
        """Characters of a call, until it ends."""
        used = 0
        self._held = self._held if call.text else self._held.lstrip()
        for character in self._held:
            used += 1
            call.add(character)
            if call.done or call.broken or self._is_foreign(call):
                break
        self._held = self._held[used:]
        if (call.broken or self._is_foreign(call)) and not self._announced:
            self._call, self._between = None, False
            yield from self._content(self._marker + call.text)
            return
        yield from self._report(call)
        if call.done or call.broken:
            self._call, self._between, self._blanks = None, True, ""
            self.num_calls += 1

    def _is_foreign(self, call: CallScanner) -> bool:
        """Whether this names a function that may not be called."""
        names = self.names if self._marker or self.names is not None else self.functions
        return names is not None and call.name is not None and call.name not in names

    def _report(self, call: CallScanner) -> Iterator[Part]:
        """The call's begin, once its name is known, and new arguments."""
        if call.name is None or (self.most is not None and self.num_calls >= self.most):
            self._announced = self._announced or call.name is not None
            return
        if not self._announced:
            self._announced = True
            yield Part("call", call.name, self.num_calls)
        if arguments := call.new_arguments():
            yield Part("arguments", arguments, self.num_calls)


class ReasoningParser:
    """Takes out what stands between `<think>` and `</think>` at the begin of a text."""

    BEGIN, END = BEGIN_OF_REASONING, END_OF_REASONING

    def __init__(self, *, begun: bool) -> None:
        """`begun`: the prompt ends with the begin marker."""
        self.begun, self.ended = begun, False
        self._held = ""
        self._follows = False
        """Whether anything but blanks has come behind the reasoning."""

    @classmethod
    def is_open(cls, prompt: str, *, goes_on: bool) -> bool:
        """Whether a prompt has begun reasoning: at its end, or in the last message with which the answer `goes_on`."""
        if not goes_on:
            return prompt.rstrip().endswith(cls.BEGIN)
        return cls.BEGIN in prompt and cls.END not in prompt.rpartition(cls.BEGIN)[2]

    def add(self, text: str) -> tuple[str, str]:
        """(reasoning, text behind it) that this text completes."""
        if self.ended:
            text = text if self._follows else text.lstrip()
            self._follows = self._follows or bool(text)
            return "", text
        self._held += text
        if not self.begun:
            held = self._held.lstrip()
            if not held.startswith(self.BEGIN):
                if self.BEGIN.startswith(held):
                    return "", ""
                self._follows = True
                return "", self._end()
            self.begun, self._held = True, held[len(self.BEGIN) :]
        reasoning, end, rest = self._held.partition(self.END)
        if end:
            self._held = rest.lstrip()
            self._follows = bool(self._held)
            return reasoning, self._end()
        keep = partial(self._held, (self.END,))
        reasoning, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return reasoning, ""

    def finish(self) -> tuple[str, str]:
        """The rest at the end of the text: reasoning that did not end, or text."""
        held, self._held = self._held, ""
        return (held, "") if self.begun and not self.ended else ("", held)

    def _end(self) -> str:
        held, self._held, self.ended = self._held, "", True
        return held


class OutputParser:
    """Reasoning, then content and calls, of one choice."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self.reasoning, self.calls = reasoning, calls

    def add(self, text: str) -> list[Part]:
        """The parts that this text completes."""
        thought, rest = self.reasoning.add(text) if self.reasoning is not None else ("", text)
        return [*self._thought(thought), *(self._text(rest) if rest else ())]

    def finish(self) -> list[Part]:
        """The rest at the end of the text."""
        thought, rest = self.reasoning.finish() if self.reasoning is not None else ("", "")
        parts = [*self._thought(thought), *(self._text(rest) if rest else ())]
        return [*parts, *(self.calls.finish() if self.calls is not None else ())]

    @property
    def has_calls(self) -> bool:
        return self.calls is not None and self.calls.num_calls > 0

    @staticmethod
    def _thought(text: str) -> Iterable[Part]:
        return (Part("reasoning", text),) if text else ()

    def _text(self, text: str) -> list[Part]:
        return self.calls.add(text) if self.calls is not None else [Part("content", text)]


def partial(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of the text with which a marker begins."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest
