"""Chat templates: Jinja text that came with the weights, so foreign input.

A template runs in a process of its own, in Jinja's immutable sandbox, with limits on CPU time and memory that the
kernel enforces, because no list of dangerous filters can be complete. The process is kept for the next conversation and
replaced after it exceeded a limit. This module owns those processes; `render_child.py` is the program they run.

Called by `tokenizer`; a template is rendered in a process of its own (`render_process`).
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping, Sequence

from stoker.model.render_frames import encode_text
from stoker.model.render_process import RenderError, RenderProcess

MAX_TEMPLATE_CHARACTERS = 256 * 1024
TIME_LIMIT_S = 5.0
"""CPU time of one rendering, and of compiling the template."""
MAX_PROCESSES = 2
"""Render processes of one template; a further conversation waits for one of them."""

Message = Mapping[str, object]


class ChatTemplateError(ValueError):
    """The template is damaged, does not take these messages, or exceeds a limit."""


class ChatTemplate:
    """One compiled template. Threads may share it."""

    def __init__(
        self, source: str, variables: Mapping[str, object] | None = None, *, time_limit_s: float = TIME_LIMIT_S
    ) -> None:
        """Start a process that compiles `source`.

        `variables`: what the template sees beside the messages, such as bos_token.

        Raises:
            ChatTemplateError: `source` is too long, is no template, or cannot be compiled within the limits.
        """
        if len(source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateError(
                f"chat template: {len(source)} characters; at most {MAX_TEMPLATE_CHARACTERS} are allowed"
            )
        self.source, self.variables, self.time_limit_s = source, dict(variables or {}), time_limit_s
        self._free = threading.BoundedSemaphore(MAX_PROCESSES)
        self._idle: list[RenderProcess] = [self._start()]  # an error shows now, not at the first request
        weakref.finalize(self, _close_all, self._idle)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        **settings: object,
    ) -> str:
        """Return the text of a conversation; messages, tools and settings are JSON values.

        Raises:
            ChatTemplateError: the template refuses the conversation (with its own message), or a limit is exceeded.
        """
        context = {
            **self.variables,
            **settings,
            "messages": list(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            request = json.dumps(context).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatTemplateError(f"chat template: messages and settings must be JSON: {error}") from error
        with self._free:
            return self._render(request)

    def _render(self, request: bytes) -> str:
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        try:
            text = process.ask(request, self.time_limit_s)
        except RenderError as error:
            raise ChatTemplateError(f"chat template: {error}") from error
        finally:
            if not process.has_ended:
                self._idle.append(process)
        return text

    def _start(self) -> RenderProcess:
        process = RenderProcess()
        try:
            process.ask(encode_text(self.source), self.time_limit_s)
        except RenderError as error:
            process.close()
            raise ChatTemplateError(f"chat template: {error}") from error
        return process


def _close_all(processes: list[RenderProcess]) -> None:
    for process in processes:
        process.close()
