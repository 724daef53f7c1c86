"""Files that a command writes are whole, or as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.cli.exit_status import STORAGE_FAILED, WRONG_INPUT, code_of_file
from stoker.cli.output_file import OutputFile
from testing.cli.small_disk import room_for


def test_a_file_has_its_new_content_and_its_mode(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to(file)
    with OutputFile(link) as output:
        assert file.read_bytes() == b"old"
        output.write(b"new")
    assert (file.read_bytes(), file.stat().st_mode & 0o777, link.is_symlink()) == (b"new", 0o640, True)
    assert sorted(tmp_path.iterdir()) == [file, link]


@pytest.mark.parametrize("old", [b"old", None], ids=["replaced", "made"])
def test_without_room_a_file_is_as_it_was(tmp_path: Path, old: bytes | None) -> None:
    file = tmp_path / "file"
    if old is not None:
        file.write_bytes(old)
    with pytest.raises(OSError, match="File too large") as told, room_for(100), OutputFile(file) as output:
        output.write(bytes(200))
    assert (told.value.filename, code_of_file(told.value)) == (str(file), STORAGE_FAILED)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if old is None else [old])


def test_a_failure_before_the_result_leaves_a_file_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(KeyError), OutputFile(tmp_path / "file"):
        raise KeyError
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


@pytest.mark.parametrize("path", ["no/such/folder/file", "."])
def test_a_path_that_is_no_file_is_found_out_at_once(tmp_path: Path, path: str) -> None:
    with pytest.raises(OSError, match=r"No such file|Is a directory") as told:
        OutputFile(tmp_path / path)
    assert (told.value.filename, code_of_file(told.value)) == (str(tmp_path / path), WRONG_INPUT)


def test_devices_and_pipes_take_the_content_and_stay(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device"), OutputFile(Path("/dev/full")) as output:
        output.write(b"content")
    assert Path("/dev/full").is_char_device()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with OutputFile(pipe) as output:
        output.write(b"content")
    assert os.read(reading, 100) == b"content"
    os.close(reading)
    assert pipe.is_fifo()
