"""Standard output and error of a program where they may fail: a full disk, or a pipe without a reader.

A command whose output is lost ends with one line and the code of `StorageError`, whatever it was doing. What is lost of
standard error has no other place: it is dropped, and the exit code stays that of the error.

Owned by `command_line`, which guards the streams of every program that people start.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputLost(Exception):
    """Standard output takes no more text. No OSError, so that it is taken for no error of a file or a connection."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output: {error.strerror}")
        self.has_no_reader = isinstance(error, BrokenPipeError)


def guard_streams() -> None:
    """Let the standard streams of this process report a loss as this module does. A closed stream stays as it is."""
    if sys.stdout is not None:
        sys.stdout = _opened_anew(sys.stdout, _Output)
    if sys.stderr is not None:
        sys.stderr = _opened_anew(sys.stderr, _ErrorOutput)


def drop_output() -> None:
    """Let the null device take the rest of standard output, also what its buffers hold."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


class _Output(io.FileIO):
    """Standard output."""

    def write(self, content: ReadableBuffer, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            raise OutputLost(error) from error


class _ErrorOutput(io.FileIO):
    """Standard error."""

    def write(self, content: ReadableBuffer, /) -> int:
        try:
            return super().write(content)
        except OSError:
            return memoryview(content).nbytes


def _opened_anew(stream: TextIO, kind: type[io.FileIO]) -> TextIO:
    """A stream of the same file with the same settings, whose bytes go through `kind`."""
    assert isinstance(stream, io.TextIOWrapper), "guarded once, before anything stands in for it"
    raw = kind(stream.fileno(), "wb", closefd=False)
    is_buffered = isinstance(stream.buffer, io.BufferedWriter)  # not with `python -u`
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if is_buffered else raw,  # as Python makes it
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
