"""The token cache: its errors, and the progress that those who work on it and those who wait for it report."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import pytest

from stoker.pod.causes import Cause
from stoker.trainer.errors import DataError
from stoker.trainer.rank.data.cache import REPORT_BYTES, cache_lock, content_digest
from stoker.trainer.rank.data.files import LocalFile
from stoker.trainer.rank.data.shard import ABANDONED_S, Encoded, open_shard, remove_abandoned, write_shard
from stoker.trainer.rank.data.source import Document, Text
from stoker.trainer.rank.main import cause_of


def test_a_full_cache_is_named(tmp_path: Path) -> None:
    """The error of a write to an open file lacks the file's name."""
    with pytest.raises(OSError, match=str(tmp_path)) as failure, cache_lock(tmp_path, lambda _: None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert cause_of(failure.value) == Cause.STORAGE_ERROR


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """This file opens, and its first read fails: address 0 of a process is never mapped."""
    broken = Path("/proc/self/mem")
    with pytest.raises(DataError, match="/proc/self/mem: Input/output error"):
        content_digest([LocalFile(broken)], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_hashing_reports_its_progress(tmp_path: Path) -> None:
    """A rank that is silent for long counts as hung."""
    file, reported = tmp_path / "corpus.txt", list[int]()
    with file.open("wb") as stream:
        stream.truncate(2 * REPORT_BYTES + 1)
    content_digest([LocalFile(file)], tmp_path, reported.append)
    assert reported == [REPORT_BYTES, 2 * REPORT_BYTES]


def test_who_waits_for_the_cache_reports_what_its_holder_does(tmp_path: Path) -> None:
    lines, told = list[str](), Event()

    def note(line: str) -> None:
        lines.append(line)
        if "%" in line:
            told.set()

    def wait() -> None:
        with cache_lock(tmp_path, note, report_s=0):
            pass

    with cache_lock(tmp_path, lines.append) as report:
        (waiting := Thread(target=wait)).start()
        report("Tokenizing books 34 %")
        assert told.wait(60)
    waiting.join()
    assert {*lines} - {"WaitingForTokens"} == {"Tokenizing books 34 %", "WaitingForTokens Tokenizing books 34 %"}


def test_a_new_holder_does_not_show_the_work_of_one_that_died(tmp_path: Path) -> None:
    with cache_lock(tmp_path, lambda _: None) as report:
        report("Tokenizing books 34 %")
    with cache_lock(tmp_path, lambda _: None):
        assert (tmp_path / "lock").read_text().strip() == ""


def test_a_cache_on_a_file_system_without_locks_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # as Lustre does without the mount option flock

    monkeypatch.setattr("fcntl.flock", refuse)
    reported: list[str] = []
    with cache_lock(tmp_path, reported.append) as report:
        report("Tokenizing books 34 %")
    assert reported == ["Tokenizing books 34 %"]


def test_shards_of_processes_that_died_are_removed_and_growing_ones_stay(tmp_path: Path) -> None:
    now_s = 1_800_000_000.0
    for name, age_s in (("old", ABANDONED_S + 1), ("growing", ABANDONED_S - 1)):
        (folder := tmp_path / f"{name}.77.part").mkdir()
        (folder / "tokens.bin").touch()
        os.utime(folder / "tokens.bin", (now_s, now_s - age_s))
        os.utime(folder, (now_s, now_s - 2 * ABANDONED_S))
    (tmp_path / "whole").mkdir()
    (tmp_path / "contents.txt.77.part").touch()
    remove_abandoned(tmp_path, now_s)
    assert {path.name for path in tmp_path.iterdir()} == {"growing.77.part", "whole", "contents.txt.77.part"}


@dataclass(frozen=True)
class Letters:
    """A token per character."""

    vocab_size: int = 256
    pad_id: int = 0
    end_id: int | None = None
    fingerprint: str = "letters"

    def encode(self, documents: Sequence[Document]) -> list[Encoded]:
        return [Encoded(list(document.text.encode())) for document in documents if isinstance(document, Text)]


def test_a_shard_that_another_node_writes_at_the_same_time_stays_whole(tmp_path: Path) -> None:
    """Nodes of a shared folder whose locks do not reach each other; their processes may have the same number."""
    texts, folder = [Text("one"), Text("two")], tmp_path / "0a1b"

    def written_elsewhere_meanwhile() -> Iterator[Document]:
        yield texts[0]
        write_shard(folder, iter(texts), Letters(), lambda _: None)
        yield texts[1]

    write_shard(folder, written_elsewhere_meanwhile(), Letters(), lambda _: None)
    assert open_shard(folder).tokens.tolist() == list(b"onetwo")
    assert [path.name for path in tmp_path.iterdir()] == ["0a1b"]
