"""The bytes of a remote file as Python's buffered reader takes them.

What `fsspec` opens reads lines by seeking, which a web server's answer without a length cannot: `BufferedReader` over
this needs `read` alone. Made by `files`.
"""

from __future__ import annotations

import io
from typing import Any

from stoker.trainer.errors import DataError

READ_BYTES = 1 << 20
"""Read at once: each read of an answer without a length is handed to the thread of its connection."""


class RemoteStream(io.RawIOBase):
    """Owns a file of `fsspec`, and closes it."""

    def __init__(self, opened: Any, name: str) -> None:
        """`name`: of the file, for errors."""
        self._opened, self._name = opened, name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._opened.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`.

        Raises:
            DataError: the server gives the file from its beginning only.
        """
        try:
            self._opened.seek(offset, whence)
        except ValueError as error:
            raise DataError(
                f"{self._name}: the server gives no length and no parts of the file ({error}), which parquet needs; "
                "text, jsonl and tokens are read from their beginning"
            ) from error
        return self.tell()

    def tell(self) -> int:
        return int(self._opened.tell())

    def close(self) -> None:
        if not self.closed:
            self._opened.close()
        super().close()
