"""A file that a command was asked to write: afterwards it has its old or its new content, never a part of it.

Called by the verbs with an option for a file. A device or a pipe (`/dev/stdout`) takes the content as it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType


class OutputFileError(OSError):
    """The file cannot be written. Its text names the file that was asked for, and the reason."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class OutputFile:
    """A file that can be written, found out before the work whose result it takes. Entered until that is written.

    A link stays a link, and a file keeps its mode.
    """

    def __init__(self, path: Path) -> None:
        """Raises OutputFileError."""
        with _named(path):
            self._path, self._target = path, path.resolve()
            is_whole = self._target.is_file() or not self._target.exists()
            self._new = self._target.with_name(f".{self._target.name}.{os.getpid()}.new") if is_whole else None
            self._stream = (self._new or self._target).open("wb")

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()
        if self._new is not None:
            self._new.unlink(missing_ok=True)

    def write(self, content: bytes) -> None:
        """Let the file have this content.

        Raises:
            OutputFileError: the file is as it was.
        """
        with _named(self._path):
            self._stream.write(content)
            self._stream.flush()
            if self._new is not None:
                os.fsync(self._stream.fileno())
                if self._target.exists():
                    self._new.chmod(self._target.stat().st_mode & 0o777)
                self._new.replace(self._target)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputFileError(error.errno, error.strerror, str(path)) from error
