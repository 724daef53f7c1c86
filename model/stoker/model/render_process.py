"""The parent's end of a render process: one question, one answer, within its limits.

Owns one child process (`render_child`), until `close` or the child's end. Called by `chat_template`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import NoReturn

from stoker.model.render_frames import (
    ANSWER,
    DONE,
    MAX_TEXT_CHARACTERS,
    MEMORY_BYTES,
    OUT_OF_MEMORY,
    QUESTION,
    decode_text,
)

MAX_ANSWER_BYTES = 4 * MAX_TEXT_CHARACTERS
GRACE_S = 60.0
"""Wall-clock time beyond the CPU limit, for a machine that is busy with other work."""
KEPT_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TZ")
"""Environment of a render process: what the interpreter and the template's clock need, and no secret."""


class RenderError(Exception):
    """There is no text; the message gives the reason."""


class RenderProcess:
    """A child that renders one template. Not for several threads at once."""

    def __init__(self) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "stoker.model.render_child"],  # -P: no module of the working folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
            bufsize=0,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._questions, self._answers = self._child.stdin, self._child.stdout

    @property
    def has_ended(self) -> bool:
        """True after a limit was exceeded, or after `close`."""
        return self._child.returncode is not None

    def ask(self, question: bytes, time_limit_s: float) -> str:
        """Return the answer to a template's source or to a conversation.

        Raises:
            RenderError: the template refuses, or a limit is exceeded; after the second the process has ended.
        """
        deadline = time.monotonic() + time_limit_s + GRACE_S
        try:
            self._send(QUESTION.pack(time_limit_s, len(question)) + question)
            kind, length = ANSWER.unpack(self._receive(ANSWER.size, deadline))
            if length > MAX_ANSWER_BYTES:
                raise EOFError
            text = decode_text(self._receive(length, deadline))
        except (EOFError, OSError, TimeoutError):
            self._explain_end(time_limit_s)
        if kind != DONE:
            raise RenderError(text)
        return text

    def close(self) -> None:
        """End the process. Harmless twice."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._questions, self._answers):
            with suppress(OSError):
                pipe.close()

    def _send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._questions.fileno(), rest) :]

    def _receive(self, length: int, deadline: float) -> bytes:
        data = bytearray()
        waiting = select.poll()
        waiting.register(self._answers, select.POLLIN)
        while len(data) < length:
            if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(self._answers.fileno(), min(length - len(data), 2**20))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)

    def _explain_end(self, time_limit_s: float) -> NoReturn:
        """End a process that gave no answer, and name the limit that it exceeded."""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(1.0)  # its pipe closes a moment before its exit status is known
        self.close()
        code = self._child.returncode
        if code == OUT_OF_MEMORY:
            raise RenderError(f"needs more than {MEMORY_BYTES // 2**20} MiB of memory")
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            raise RenderError(f"took longer than {time_limit_s} s")
        raise RenderError(f"ended its render process (exit code {code})")
