"""Files of a source that must not be written between the start of their hashing and the end of their tokenising.

The hash names what is made of the documents, and each is made by a reading of its own. Called by `corpus` and
`byte_bpe`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stoker.trainer.errors import DataError
from stoker.trainer.rank.data.files import DataFile
from stoker.trainer.rank.data.source import Document


class UnchangedFiles:
    """Remembers the versions that files of this machine have when it is made."""

    def __init__(self, source: str, files: Sequence[DataFile]) -> None:
        """`source`: its name, for errors. Raises DataError for a file that cannot be looked at."""
        self._source, self._files = source, files
        self._before = self._versions()

    def documents(self, documents: Iterator[Document]) -> Iterator[Document]:
        """Yield the documents of the files, then `check`."""
        yield from documents
        self.check()

    def check(self) -> None:
        """Check that the files have the versions that they had.

        Raises:
            DataError: a file was written meanwhile: its documents may not be those of the hash.
        """
        for file, before, now in zip(self._files, self._before, self._versions(), strict=True):
            if now != before:
                raise DataError(
                    f"data source {self._source}: {file.name} was changed while it was read; start when its writer "
                    "has ended"
                )

    def _versions(self) -> list[tuple[int, ...] | None]:
        try:
            return [file.version for file in self._files]
        except OSError as error:
            raise DataError(f"data source {self._source}: {error.filename}: {error.strerror}") from error
