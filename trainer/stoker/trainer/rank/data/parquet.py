"""Documents of Parquet files: a row is a document, its column `text` or `messages`. Other columns are not read.

`pyarrow` is imported when a file is read. Called by `source`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import DataError

ROWS = 1024
"""Rows that are decoded together."""
COLUMNS = ("text", "messages")


def read_rows(stream: BinaryIO, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and fields (`text` or `messages`) of each row.

    Raises:
        ConfigError: pyarrow is not installed.
        DataError: the file is no Parquet file, damaged, or has not exactly one of the two columns.
    """
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"{where}: format parquet needs pyarrow: install stoker[parquet]") from error
    with _damage(where, ArrowException):
        file = ParquetFile(stream)
        column = _column(file.schema_arrow.names, where)
        number = 0
        for batch in file.iter_batches(batch_size=ROWS, columns=[column]):
            for value in _values(batch.column(0), where, number):
                number += 1
                yield f"{where}: row {number}", {column: value}


@contextmanager
def _damage(where: str, arrow_error: type[Exception]) -> Iterator[None]:
    """Turn what pyarrow finds wrong in a file into DataError. Its OSError has no number; that of a disk has one."""
    try:
        yield
    except (arrow_error, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
            raise
        raise DataError(f"{where}: not a readable Parquet file ({str(error).strip()})") from error


def _values(column: Any, where: str, before: int) -> list[Any]:
    """The values of an Arrow array, behind `before` rows of the file."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        row = before + _undecodable(column) + 1
        raise DataError(f"{where}: row {row}: not UTF-8 text ({error.reason})") from error


def _undecodable(column: Any) -> int:
    """The place of the first value that is not UTF-8; there is one."""
    for place, value in enumerate(column):
        try:
            value.as_py()
        except UnicodeDecodeError:
            return place
    raise AssertionError(f"each of {len(column)} values is UTF-8")


def _column(names: list[str], where: str) -> str:
    found = [name for name in COLUMNS if name in names]
    if len(found) != 1:
        raise DataError(f"{where}: exactly one of the columns text and messages is needed, got {sorted(names)}")
    return found[0]
