"""The processes in which kernels are interpreted."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.model.interpreted import Interpreted, start_server


def write_server(file: str) -> None:
    """Write the process that forked the worker's parent."""
    parent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]
    Path(file).write_text(parent)


def fail(number: int) -> None:
    raise ValueError(f"check {number}")


def hang(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    time.sleep(600)


@pytest.fixture(scope="module")
def own() -> Iterator[Interpreted]:
    processes = Interpreted()
    yield processes
    processes.close()


def test_checks_of_every_call_come_from_one_server(own: Interpreted, tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in "ab"]
    for file in files:
        own.run([(write_server, (file,))])
    first, second = (int(Path(file).read_text()) for file in files)
    assert first == second
    assert Path(f"/proc/{first}").exists()


def test_a_status_is_not_read_together_with_the_group_before_it() -> None:
    """A buffer would take both where a check ends at once, and the wait for the second would be in vain."""
    server = start_server()
    try:
        assert isinstance(server.stdout, io.FileIO)
    finally:
        server.kill()
        server.communicate()


def test_a_check_that_fails_is_named_and_the_next_ones_run(own: Interpreted, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)fail\(3,\).*ValueError: check 3.*fail\(4,\).*ValueError: check 4"):
        own.run([(fail, (3,)), (fail, (4,))])
    own.run([(write_server, (str(tmp_path / "after"),))])


def test_no_process_outlives_a_call_that_takes_too_long(own: Interpreted, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"no end within 20 s"):
        own.run([(hang, (str(tmp_path / "pid"),))], timeout_s=20)
    worker = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 60
    while lives(worker):
        assert time.monotonic() < until
        time.sleep(0.01)
    own.run([(write_server, (str(tmp_path / "after"),))])


def lives(pid: int) -> bool:
    """Whether it runs: one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
