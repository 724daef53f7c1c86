"""Retention: a checkpoint with a reader stays, and a failed deletion is reported and retried."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stoker.checkpoint.errors import CheckpointError, CheckpointInUse, CheckpointMissing
from stoker.checkpoint.manifest import MANIFEST_FILE
from stoker.checkpoint.manifest_file import being_read
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.storage import PosixStorage
from stoker.checkpoint.store import CheckpointRoot, Retained
from stoker.checkpoint.verify import verify
from testing.checkpoint.synthetic import SMALL, WRITER, make_state, save


def name(step: int) -> str:
    return f"step-{step:08d}.{WRITER}"


def steps(root: CheckpointRoot) -> list[int]:
    return [found.step for found in root.committed()]


def retain(root: CheckpointRoot) -> Retained:
    return root.retain(1, lambda _: True)


@pytest.fixture
def root(tmp_path: Path) -> CheckpointRoot:
    root = CheckpointRoot(tmp_path)
    for step in (1, 2, 3):
        save(root, make_state(SMALL), step=step)
    return root


def test_a_checkpoint_that_is_read_stays_until_it_is_not(root: CheckpointRoot) -> None:
    reader = CheckpointReader(root.root / name(1))
    with being_read(root.root / name(2)):
        problems = tuple(f"{name(step)}: {root.root / name(step)} is being read" for step in (2, 1))
        assert retain(root) == Retained(problems=problems)
    for tensor in reader.manifest.tensors:
        reader.read(tensor)
    assert retain(root).deleted == (name(2),)
    reader.close()
    assert retain(root).deleted == (name(1),)
    assert steps(root) == [3]


def test_a_reader_that_is_forgotten_holds_nothing(root: CheckpointRoot) -> None:
    reader = CheckpointReader(root.root / name(1))
    del reader
    assert retain(root).problems == ()


READER = """
import sys
from pathlib import Path
from stoker.checkpoint.reader import CheckpointReader
reader = CheckpointReader(Path(sys.argv[1]))
print("reads", flush=True)
sys.stdin.read()
"""


def test_a_reader_in_another_process_is_seen_and_its_death_ends_its_hold(root: CheckpointRoot) -> None:
    command = [sys.executable, "-c", READER, str(root.root / name(1))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        assert retain(root).deleted == (name(2),)
        reader.kill()
    assert retain(root) == Retained(deleted=(name(1),))


def test_what_is_being_verified_is_not_given_up(root: CheckpointRoot) -> None:
    seen: list[tuple[str, ...]] = []
    verify(root.root / name(1), progress=lambda done, total: seen.append(retain(root).deleted))
    assert (seen[0], seen[-1]) == ((name(2),), ())
    assert retain(root).deleted == (name(1),)


def test_who_opens_a_checkpoint_while_it_is_given_up_finds_nothing(root: CheckpointRoot) -> None:
    """The reader waits for the claim; then its lock is on a file that has no name any more."""
    folder = root.root / name(1)
    found: list[type[BaseException]] = []

    def read() -> None:
        try:
            CheckpointReader(folder)
        except CheckpointError as error:
            found.append(type(error))

    reader = threading.Thread(target=read)
    with PosixStorage().lock_exclusive(folder / MANIFEST_FILE):
        reader.start()
        folder.rename(root.root / f".deleting-{name(1)}")
    reader.join()
    assert found == [CheckpointMissing]


def test_one_claims_a_file_and_several_hold_it(root: CheckpointRoot) -> None:
    storage, manifest = PosixStorage(), root.root / name(1) / MANIFEST_FILE
    manifest.chmod(0o444)
    with storage.lock_exclusive(manifest), pytest.raises(CheckpointInUse, match="is being read"):
        storage.lock_exclusive(manifest)
    first, second = storage.lock_shared(manifest), storage.lock_shared(manifest)
    assert first is not None
    assert second is not None
    first.close()
    with pytest.raises(CheckpointInUse):
        storage.lock_exclusive(manifest)
    second.close()
    storage.lock_exclusive(manifest).close()
    assert storage.lock_shared(manifest.with_name("nothing")) is None


@pytest.mark.parametrize("place", ["missing", "file", "file/inside"])
def test_what_is_no_checkpoint_is_let_through(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with being_read(tmp_path / place):
        pass


class BadDisk(PosixStorage):
    """A disk that cannot remove the files of one checkpoint until it is repaired."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    def remove_file(self, path: Path) -> None:
        if path.parent.name.endswith(self.checkpoint):
            raise OSError(errno.EIO, "Input/output error", str(path))
        super().remove_file(path)


def test_what_cannot_be_deleted_is_told_hinders_no_other_and_goes_next_time(root: CheckpointRoot) -> None:
    broken = CheckpointRoot(root.root, storage=BadDisk(name(2)))
    done = retain(broken)
    assert done.deleted == (name(1),)
    (problem,) = done.problems
    assert problem.startswith(f"{name(2)}: [Errno 5] Input/output error: '{root.root}/.deleting-{name(2)}/")
    assert retain(root) == Retained(deleted=(name(2),))
    assert sorted(path.name for path in root.root.iterdir()) == ["LATEST", name(3)]
