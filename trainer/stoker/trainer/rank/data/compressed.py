"""Compressed files of text and JSONL: decompressed as a stream, by the last suffix of their names.

Called by `files` and `source`.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import BinaryIO, NamedTuple, cast

from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import DataError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
GROWTH = 4
"""A text is about so many times as long as its compressed form; an estimate, for progress."""


class Suffixes(NamedTuple):
    """What the end of a name tells of a file, in lower case."""

    data: str
    """With its dot."""
    compression: str
    """One of COMPRESSIONS, or empty."""


def suffixes_of(path: PurePath) -> Suffixes:
    """Return `.jsonl` and `.gz` of `corpus.jsonl.gz`."""
    last = path.suffix.lower()
    return Suffixes(path.with_suffix("").suffix.lower(), last) if last in COMPRESSIONS else Suffixes(last, "")


@contextmanager
def decompressed(stream: BinaryIO, compression: str, where: str) -> Iterator[BinaryIO]:
    """Yield the content of a file.

    Raises:
        ConfigError: `.zst` without pyarrow.
        DataError: the file is damaged or not whole.
    """
    if not compression:
        yield stream
        return
    try:
        with _reader(stream, compression, where) as content:
            yield cast("BinaryIO", content)
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and not _is_damage(error):
            raise
        raise DataError(f"{where}: not whole {compression} data ({error})") from error


def _is_damage(error: OSError) -> bool:
    """Whether a decompressor found it: it has no number. Those of a disk have one, those of a network or own types."""
    return error.errno is None and type(error) in (OSError, gzip.BadGzipFile)


def _reader(stream: BinaryIO, compression: str, where: str) -> io.BufferedIOBase:
    if compression == ".gz":
        return gzip.GzipFile(fileobj=stream)
    if compression == ".bz2":
        return bz2.BZ2File(stream)
    if compression == ".xz":
        return lzma.LZMAFile(stream)
    try:
        from pyarrow import CompressedInputStream
    except ImportError as error:
        raise ConfigError(f"{where}: {compression} needs pyarrow: install stoker[parquet]") from error
    return io.BufferedReader(CompressedInputStream(stream, "zstd"))
