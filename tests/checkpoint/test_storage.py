"""The POSIX storage: large files, and failures that the kernel reports only once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from stoker.checkpoint.manifest import PIECE_BYTES, Box, Manifest, TensorInfo
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.storage import PosixSink, PosixStorage
from stoker.checkpoint.store import CheckpointRoot
from stoker.checkpoint.writer import PieceWriter


def test_a_large_shard_is_cut_at_64_mib_and_comes_back(tmp_path: Path) -> None:
    tensor = TensorInfo("w", (17, 2**20 + 1), "float32")
    values = np.arange(17 * (2**20 + 1), dtype=np.float32).reshape(tensor.shape)
    root = CheckpointRoot(tmp_path)
    staging = root.begin(1, "00000000")
    writer = PieceWriter(staging, "rank-00000.bin")
    writer.add(tensor, Box.whole(tensor.shape), (0, values.size), values)
    pieces = writer.close()
    assert [piece.bytes for piece in pieces] == [PIECE_BYTES, values.nbytes - PIECE_BYTES]
    done = root.publish(staging, Manifest.build(step=1, writer="00000000", tensors=[tensor], pieces=pieces))
    read = CheckpointReader(tmp_path / done.folder_name).read("w")
    assert np.array_equal(read, values)


def failing(handle: int, data: memoryview, offset: int) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_failure_of_a_background_write_is_never_lost(tmp_path: Path) -> None:
    sink = PosixSink(tmp_path / "rank-00000.bin", put=failing, block_bytes=4096)
    sink.write(memoryview(bytes(4096)))
    with pytest.raises(OSError, match=r"Input/output error: .*rank-00000\.bin"):
        sink.sync()
    sink.close()


def test_a_failed_block_stops_the_next_writes(tmp_path: Path) -> None:
    sink = PosixSink(tmp_path / "rank-00000.bin", put=failing, block_bytes=4096)
    with pytest.raises(OSError, match="Input/output error"):
        write_until_refused(sink)
    sink.close()


def write_until_refused(sink: PosixSink) -> None:
    for _ in range(100):
        sink.write(memoryview(bytes(4096)))


def test_writes_of_any_length_come_back_in_order_also_from_a_disk_that_takes_little_at_once(tmp_path: Path) -> None:
    def little(handle: int, data: memoryview, offset: int) -> int:
        return os.pwrite(handle, data[:4096], offset)

    content = np.random.default_rng(0).integers(0, 256, 100_003, dtype=np.uint8).tobytes()
    for put in (os.pwrite, little):
        path = tmp_path / put.__name__
        sink, start = PosixSink(path, put=put, block_bytes=8192), 0
        for length in (0, 1, 8191, 8192, 8193, 40_000, 7, len(content)):
            sink.write(memoryview(content)[start : start + length])
            start = min(start + length, len(content))
        sink.sync()
        assert path.read_bytes() == content
        sink.write(memoryview(b"more"))
        sink.sync()
        sink.close()
        assert path.read_bytes() == content + b"more"


def test_a_closed_sink_refuses_to_write(tmp_path: Path) -> None:
    sink = PosixStorage().create(tmp_path / "x")
    sink.close()
    sink.close()
    with pytest.raises(OSError, match="the file is closed"):
        sink.write(memoryview(b"x"))


def test_removing_what_is_gone_is_fine(tmp_path: Path) -> None:
    PosixStorage().remove_file(tmp_path / "x")
    PosixStorage().remove_folder(tmp_path / "y")
    with pytest.raises(OSError, match="not empty"):
        PosixStorage().remove_folder(tmp_path.parent)
