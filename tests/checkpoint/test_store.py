"""Publishing, finding, retaining, deleting."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.checkpoint.box import Box
from stoker.checkpoint.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointLocked,
    CheckpointMissing,
)
from stoker.checkpoint.manifest import Manifest, TensorInfo
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import Broken, CheckpointRoot, Retained
from stoker.checkpoint.writer import PieceWriter, write_file
from testing.checkpoint.crashing_storage import ForgetfulStorage
from testing.checkpoint.synthetic import SMALL, WRITER, make_state, same_bits, save

OTHER = "ffffffff"
TENSOR = TensorInfo("w", (4,), "float32")
BOX = Box.whole((4,))


def names(root: CheckpointRoot) -> list[str]:
    return [found.folder_name for found in root.committed()]


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_committed_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    for step in (5, 100, 20):
        save(root, make_state(SMALL), step=step)
    assert names(root) == [f"step-{step:08d}.{WRITER}" for step in (100, 20, 5)]
    assert root.committed()[0].bytes == sum(tensor.bytes for tensor, _ in make_state(SMALL).values())


def test_two_writers_of_one_step_keep_their_own_folders(tmp_path: Path) -> None:
    """A stale attempt that saves late changes nothing of the current one."""
    root = CheckpointRoot(tmp_path)
    current, stale = make_state(SMALL, seed=1), make_state(SMALL, seed=2)
    done = save(root, current, step=7, writer=WRITER)
    late = save(root, stale, step=7, writer=OTHER)
    assert {done.folder_name, late.folder_name} == set(names(root))
    reader = CheckpointReader(tmp_path / done.folder_name, done.digest)
    assert all(same_bits(reader.read(name), values) for name, (_, values) in current.items())


def test_the_same_step_is_not_saved_twice(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    done = save(root, make_state(SMALL, seed=1), step=7)
    with pytest.raises(CheckpointExists, match="published once and never replaced"):
        save(root, make_state(SMALL, seed=2), step=7)
    assert root.find(done.folder_name).digest == done.digest


def test_of_two_saves_at_the_same_time_exactly_one_is_published(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    stagings = [root.begin(7, WRITER), root.begin(7, WRITER)]
    manifests = []
    for number, staging in enumerate(stagings):
        writer = PieceWriter(staging, "rank-00000.bin")
        writer.add(TENSOR, BOX, (0, 4), np.full(4, number, np.float32))
        manifests.append(Manifest.build(step=7, writer=WRITER, tensors=[TENSOR], pieces=writer.close()))
    root.publish(stagings[1], manifests[1])
    with pytest.raises(CheckpointExists):
        root.publish(stagings[0], manifests[0])
    assert root.committed()[0].digest == manifests[1].digest
    assert root.discard_unfinished([WRITER]) == [stagings[0].name]
    assert entries(tmp_path) == ["LATEST", f"step-00000007.{WRITER}"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "rank-00000.bin").unlink(), "files missing or not in the manifest: rank-00000.bin"),
        (
            lambda folder: (folder / "rank-00000.bin").write_bytes(b"123"),
            "rank-00000.bin has 3 bytes, the manifest says 16",
        ),
        (lambda folder: (folder / "notes.txt").write_text("x"), "files missing or not in the manifest: notes.txt"),
    ],
)
def test_a_staged_save_that_is_not_its_manifest_is_not_published(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    root = CheckpointRoot(tmp_path)
    staging = root.begin(1, WRITER)
    writer = PieceWriter(staging, "rank-00000.bin")
    writer.add(TENSOR, BOX, (0, 4), bytes(16))
    manifest = Manifest.build(step=1, writer=WRITER, tensors=[TENSOR], pieces=writer.close())
    spoil(staging)
    with pytest.raises(CheckpointError, match=message):
        root.publish(staging, manifest)
    assert names(root) == []


@pytest.mark.parametrize(("flat", "message"), [((0, 3), "no piece holds"), (None, "pieces overlap")])
def test_a_save_with_a_gap_or_an_overlap_is_not_published(
    tmp_path: Path, flat: tuple[int, int] | None, message: str
) -> None:
    root = CheckpointRoot(tmp_path)
    staging = root.begin(1, WRITER)
    writer = PieceWriter(staging, "rank-00000.bin")
    for first, end in [flat] if flat else [(0, 4), (3, 4)]:
        writer.add(TENSOR, BOX, (first, end), bytes(4 * (end - first)))
    manifest = Manifest.build(step=1, writer=WRITER, tensors=[TENSOR], pieces=writer.close())
    with pytest.raises(CheckpointError, match=message):
        root.publish(staging, manifest)


def test_a_manifest_is_published_only_from_its_own_staging_folder(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    staging = root.begin(1, WRITER)
    manifest = Manifest.build(step=2, writer=WRITER, tensors=[], pieces=[])
    with pytest.raises(CheckpointError, match="the manifest is for step-00000002"):
        root.publish(staging, manifest)
    with pytest.raises(CheckpointError, match="is not a staging folder"):
        root.publish(tmp_path / "elsewhere", manifest)


def test_a_folder_that_was_renamed_is_not_committed(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    done = save(root, make_state(SMALL), step=1)
    (tmp_path / done.folder_name).rename(tmp_path / f"step-00000009.{WRITER}")
    assert names(root) == []
    (broken,) = root.scan()
    assert isinstance(broken, Broken)
    assert "its manifest is that of step-00000001" in broken.problem


def test_a_link_to_a_checkpoint_is_not_committed(tmp_path: Path) -> None:
    elsewhere = CheckpointRoot(tmp_path / "elsewhere")
    done = save(elsewhere, make_state(SMALL))
    root = CheckpointRoot(tmp_path / "root")
    root.root.mkdir()
    (root.root / done.folder_name).symlink_to(elsewhere.root / done.folder_name)
    assert root.scan() == []


@pytest.mark.parametrize("hint", [None, "", "nonsense", "../elsewhere", f"step-00000099.{WRITER}", "\0", "é" * 5000])
def test_a_wrong_hint_falls_back_to_the_newest_committed(tmp_path: Path, hint: str | None) -> None:
    root = CheckpointRoot(tmp_path)
    for step in (1, 2):
        save(root, make_state(SMALL), step=step)
    if hint is None:
        (tmp_path / "LATEST").unlink()
    else:
        (tmp_path / "LATEST").write_text(hint)
    found = root.latest()
    assert found is not None
    assert found.step == 2


def test_an_empty_or_missing_root_has_no_checkpoint(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path / "not" / "yet")
    assert (root.committed(), root.latest(), root.retain(1, lambda name: True)) == ([], None, Retained())
    with pytest.raises(CheckpointMissing):
        root.find(f"step-00000001.{WRITER}")
    with pytest.raises(CheckpointMissing, match="is not the name of a checkpoint"):
        root.find("../x")


def test_a_digest_that_is_not_the_wanted_one_is_refused(tmp_path: Path) -> None:
    done = save(CheckpointRoot(tmp_path), make_state(SMALL))
    with pytest.raises(CheckpointCorrupt, match="is wanted"):
        CheckpointReader(tmp_path / done.folder_name, "0" * 64)


def test_retention_deletes_only_verified_steps_beyond_the_newest_verified(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    for step in range(1, 7):
        save(root, make_state(SMALL), step=step)
    verified = {f"step-{step:08d}.{WRITER}" for step in (1, 2, 4, 5)}
    done = root.retain(2, verified.__contains__)
    assert done == Retained(deleted=tuple(f"step-{step:08d}.{WRITER}" for step in (2, 1)))
    assert names(root) == [f"step-{step:08d}.{WRITER}" for step in (6, 5, 4, 3)]
    with pytest.raises(CheckpointError, match="keep must be >= 1"):
        root.retain(0, verified.__contains__)


def test_nothing_verified_means_nothing_deleted(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    for step in range(1, 5):
        save(root, make_state(SMALL), step=step)
    assert root.retain(1, lambda name: False) == Retained()
    assert len(names(root)) == 4


def test_delete_removes_the_listed_files_and_the_folder_and_may_be_repeated(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    done = save(root, make_state(SMALL), files={"config.json": b"{}"})
    first = root.delete(done.folder_name, done.digest)
    assert (first.files, first.bytes) == (("config.json", "rank-00000.bin"), done.bytes)
    assert root.delete(done.folder_name, done.digest).files == ()
    assert entries(tmp_path) == ["LATEST"]
    assert root.latest() is None


def test_delete_with_another_digest_removes_nothing(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    done = save(root, make_state(SMALL))
    with pytest.raises(CheckpointCorrupt, match="nothing deleted"):
        root.delete(done.folder_name, "0" * 64)
    assert names(root) == [done.folder_name]


def test_delete_leaves_what_no_manifest_lists(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    done = save(root, make_state(SMALL))
    (tmp_path / done.folder_name / "notes.txt").write_text("mine")
    assert root.delete(done.folder_name, done.digest).left == ("notes.txt",)
    assert (tmp_path / done.folder_name / "notes.txt").read_text() == "mine"
    assert names(root) == []


def test_delete_does_not_follow_links(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path / "root")
    done = save(root, make_state(SMALL))
    data = root.root / done.folder_name / "rank-00000.bin"
    outside = data.rename(tmp_path / "outside")
    data.symlink_to(outside)
    root.delete(done.folder_name, done.digest)
    assert outside.exists()
    assert not data.parent.exists()


def test_unfinished_saves_of_other_writers_are_left_alone(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    mine, others = root.begin(1, WRITER), root.begin(1, OTHER)
    (mine / "rank-00000.bin").write_bytes(b"half")
    assert root.discard_unfinished([WRITER]) == [mine.name]
    assert others.exists()
    assert root.discard_unfinished() == [others.name]


def test_discard_refuses_a_published_folder(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    done = save(root, make_state(SMALL))
    with pytest.raises(CheckpointError, match="is not a staging folder"):
        root.discard(tmp_path / done.folder_name)
    assert names(root) == [done.folder_name]


HOLDER = """
import sys
from pathlib import Path
from stoker.checkpoint.store import CheckpointRoot
with CheckpointRoot(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_root_on_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # as Lustre does without the mount option flock

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(OSError, match="needs a file system with locks") as caught, CheckpointRoot(tmp_path).lock():
        pass
    assert caught.value.filename == str(tmp_path / ".lock")


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file of this process have a byte more."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_on_a_full_disk_a_run_still_removes_what_a_killed_save_left(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    staging = root.begin(1, WRITER)
    (staging / "rank-00000.bin").write_bytes(bytes(100))
    with full_disk(), root.lock():
        assert root.discard_unfinished() == [staging.name]
        with pytest.raises(CheckpointLocked, match="in use by another run"), root.lock():
            pass


def test_a_root_is_locked_by_one_process_and_freed_by_its_death(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path / "root")
    command = [sys.executable, "-c", HOLDER, str(root.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointLocked, match=f"process {holder.pid} on"), root.lock():
            pass
        holder.kill()
    with root.lock(), pytest.raises(CheckpointLocked), root.lock():
        pass
    with root.lock():
        pass


@pytest.mark.parametrize(
    ("box", "flat", "data", "message"),
    [
        (Box((1,), (4,)), (0, 4), bytes(16), "leaves the shape"),
        (BOX, (0, 5), bytes(20), "flat range"),
        (BOX, (3, 2), b"", "flat range"),
        (BOX, (0, 4), bytes(15), "15 bytes given, 4 elements of float32 take 16"),
        (BOX, (0, 4), np.zeros((4, 2), np.float32)[:, 0], "one contiguous buffer is needed"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(
    tmp_path: Path, box: Box, flat: tuple[int, int], data: Any, message: str
) -> None:
    with PieceWriter(tmp_path, "rank-00000.bin") as writer, pytest.raises(CheckpointError, match=message):
        writer.add(TENSOR, box, flat, data)
    assert entries(tmp_path) == []


def test_a_closed_writer_refuses_more(tmp_path: Path) -> None:
    writer = PieceWriter(tmp_path, "rank-00000.bin")
    writer.add(TENSOR, BOX, (0, 4), bytearray(16))
    assert [piece.bytes for piece in writer.close()] == [16]
    with pytest.raises(CheckpointError, match="the writer is closed"):
        writer.add(TENSOR, BOX, (0, 4), bytes(16))
    with pytest.raises(CheckpointError, match="the writer is closed"):
        writer.close()


@pytest.mark.parametrize("name", ["../x", "a/b", "manifest.json", ".x", ""])
def test_files_are_written_under_plain_names_only(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="must be a plain name"):
        PieceWriter(tmp_path, name)
    with pytest.raises(CheckpointError, match="must be a plain name"):
        write_file(tmp_path, name, b"")


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.bin").write_bytes(b"old")
    writer = PieceWriter(tmp_path, "rank-00000.bin")
    with pytest.raises(FileExistsError):
        writer.add(TENSOR, BOX, (0, 4), bytes(16))
    with pytest.raises(CheckpointError, match="a write failed"):
        writer.close()
    assert (tmp_path / "rank-00000.bin").read_bytes() == b"old"


def test_travelling_files_come_back_verified(tmp_path: Path) -> None:
    done = save(CheckpointRoot(tmp_path), make_state(SMALL), files={"config.json": b"{}", "tokenizer.json": b"abc"})
    reader = CheckpointReader(tmp_path / done.folder_name)
    files = {entry.name: reader.read_file(entry.name) for entry in reader.manifest.files}
    assert files == {"config.json": b"{}", "tokenizer.json": b"abc"}
    (tmp_path / done.folder_name / "config.json").write_bytes(b"[]")
    with pytest.raises(CheckpointCorrupt, match=r"config\.json is not what was written"):
        reader.read_file("config.json")
    with pytest.raises(CheckpointMissing, match=r"no file 'merges\.txt'"):
        reader.read_file("merges.txt")


def test_the_lock_makes_its_root_durable(tmp_path: Path) -> None:
    """A power cut must not remove a published save with a parent folder that never reached the disk."""
    storage = ForgetfulStorage(tmp_path)
    root = CheckpointRoot(tmp_path / "runs" / "tiny", storage=storage)
    with root.lock():
        save(root, make_state(SMALL), step=1)
    assert any(name.startswith("runs/tiny/step-00000001.") for name in storage.cuts[-1]["synced"])


def test_a_half_done_delete_is_finished_by_the_holder_of_the_lock_only(tmp_path: Path) -> None:
    """Without the lock another process may be deleting at the same time."""
    root = CheckpointRoot(tmp_path)
    name = save(root, make_state(SMALL), step=7).folder_name
    (tmp_path / name).rename(tmp_path / f".deleting-{name}")
    assert root.discard_unfinished([WRITER]) == []
    assert root.discard_unfinished() == [f".deleting-{name}"]
