"""Documents of Parquet files: a row is a document, its column `text` or `messages`. Other columns are not read.

`pyarrow` is imported when a file is read. Called by `source`.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        DataError: the file is no Parquet file, or has not exactly one of the two columns.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError(f"{where}: format parquet needs pyarrow: install stoker[parquet]") from error
    try:
        file = ParquetFile(stream)
        column = _column(file.schema_arrow.names, where)
        number = 0
        for batch in file.iter_batches(batch_size=ROWS, columns=[column]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield f"{where}: row {number}", {column: value}
    except pyarrow.ArrowException as error:
        raise DataError(f"{where}: not a readable Parquet file ({error})") from error


def _column(names: list[str], where: str) -> str:
    found = [name for name in COLUMNS if name in names]
    if len(found) != 1:
        raise DataError(f"{where}: exactly one of the columns text and messages is needed, got {sorted(names)}")
    return found[0]
