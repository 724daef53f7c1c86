"""Crashes and full disks during a save or after it: the step before loads, or there is a clear refusal.

No tensor is ever wrong.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointError, CheckpointExists
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot, Found
from stoker.checkpoint.verify import verify
from testing.checkpoint import crashing_child
from testing.checkpoint.crashing_storage import CrashingStorage, ForgetfulStorage, FullDisk, lay_out
from testing.checkpoint.synthetic import SMALL, WRITER, State, flat_bucket, make_state, same_bits, save

OLD = make_state(SMALL, seed=1)
NEW = make_state(SMALL, seed=2)
NEXT_WRITER = "0a1b2c3e"


def holds(found: Found, state: State) -> bool:
    reader = CheckpointReader(found.path, found.digest)
    return all(same_bits(reader.read(name), values) for name, (_, values) in state.items())


def check_steps(root: CheckpointRoot) -> list[int]:
    """Assert that every offered step is whole and holds its own values."""
    found = root.committed()
    for item in found:
        assert verify(item.path, item.digest).ok
        assert holds(item, {1: OLD, 2: NEW}[item.step])
    latest = root.latest()
    assert latest is None or latest.folder_name in [item.folder_name for item in found]
    return [item.step for item in found]


def run_children(roots: Path, action: str, count: int) -> list[int]:
    """Return the exit codes of processes that die at operation 0, 1, 2, ...

    The last process has no such operation and ends by itself.
    """
    command = [sys.executable, crashing_child.__file__, str(roots), action, str(count)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return [
        int(line)
        for line in subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout.split()
    ]


def test_a_save_killed_at_any_operation_leaves_the_step_before(tmp_path: Path) -> None:
    roots = [CheckpointRoot(tmp_path / str(operations)) for operations in range(32)]
    for root in roots:
        save(root, OLD, step=1)
    codes = run_children(tmp_path, "save", len(roots))
    killed = codes.count(-signal.SIGKILL)
    assert killed > 15
    assert codes == [-signal.SIGKILL] * killed + [0] * (len(roots) - killed)
    assert len(roots) > killed
    steps = [check_steps(root) for root in roots]
    published = steps.index([2, 1])
    assert steps == [[1]] * published + [[2, 1]] * (len(roots) - published)
    for root in roots[: killed + 1]:
        check_next_attempt(root)


def check_next_attempt(root: CheckpointRoot) -> None:
    """Assert that the next attempt saves the same step under its own name and cleans up."""
    root.discard_unfinished()
    save(root, NEW, step=2, writer=NEXT_WRITER)
    assert 2 in check_steps(root)
    assert all(path.name == "LATEST" or path.name.startswith("step-") for path in root.root.iterdir())


def test_a_delete_killed_at_any_operation_never_leaves_half_a_checkpoint(tmp_path: Path) -> None:
    roots = [CheckpointRoot(tmp_path / str(operations)) for operations in range(12)]
    for root in roots:
        save(root, OLD, step=1, files={"config.json": b"{}"})
        save(root, NEW, step=2)
    codes = run_children(tmp_path, "delete", len(roots))
    assert 4 < codes.count(-signal.SIGKILL) < len(roots)
    for operations, root in enumerate(roots):
        assert check_steps(root) == ([2] if operations else [2, 1])
        root.discard_unfinished()
        assert check_steps(root) == ([2] if operations else [2, 1])
        assert not any(path.name.startswith(".deleting-") for path in root.root.iterdir())


@pytest.mark.parametrize("kept", ["names", "synced"])
def test_a_power_cut_at_any_operation_leaves_the_step_before(tmp_path: Path, kept: str) -> None:
    (tmp_path / "root").mkdir()
    storage = ForgetfulStorage(tmp_path / "root")
    root = CheckpointRoot(tmp_path / "root", storage=storage)
    save(root, OLD, step=1)
    first = len(storage.cuts) - 1
    save(root, NEW, step=2, cut=flat_bucket, ranks=2, piece_bytes=256)
    for number, cut in enumerate(storage.cuts[first:]):
        after = CheckpointRoot(tmp_path / f"after-{number}")
        lay_out(after.root, cut[kept])
        assert check_steps(after) in ([1], [2, 1])
    assert check_steps(after) == [2, 1]


def damage(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        change(folder / "rank-00000.bin")

    return apply


def flip(position: int) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 0x10
        path.write_bytes(data)

    return change


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped at the start": (damage(flip(0)), r"piece .* in rank-00000\.bin at 0 is damaged"),
    "a bit flipped in the middle": (damage(flip(300)), r"piece .* in rank-00000\.bin at \d+ is damaged"),
    "a bit flipped at the end": (damage(flip(-1)), r"piece .* in rank-00000\.bin at \d+ is damaged"),
    "cut by a byte": (damage(lambda path: os.truncate(path, path.stat().st_size - 1)), "the manifest says"),
    "cut to nothing": (damage(lambda path: os.truncate(path, 0)), "has 0 bytes, the manifest says"),
    "grown by a byte": (damage(grow), "the manifest says"),
    "missing": (damage(lambda path: path.unlink()), r"rank-00000\.bin is missing"),
    "files swapped": (
        lambda folder: swap(folder / "rank-00000.bin", folder / "rank-00001.bin"),
        "is damaged|the manifest says",
    ),
    "manifest cut": (lambda folder: os.truncate(folder / "manifest.json", 100), "manifest: "),
    "manifest empty": (lambda folder: os.truncate(folder / "manifest.json", 0), "manifest: "),
    "manifest missing": (lambda folder: (folder / "manifest.json").unlink(), "not a committed checkpoint"),
    "manifest of another save": (lambda folder: take_other_manifest(folder), "is damaged|the manifest says|is missing"),
}


def swap(first: Path, second: Path) -> None:
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)


def take_other_manifest(folder: Path) -> None:
    other = CheckpointRoot(folder.parent / "other")
    done = save(other, make_state(SMALL, seed=3), step=2, cut=flat_bucket, ranks=2, piece_bytes=200)
    (folder / "manifest.json").write_bytes((other.root / done.folder_name / "manifest.json").read_bytes())


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_refused_by_name_and_the_step_before_still_loads(tmp_path: Path, case: str) -> None:
    root = CheckpointRoot(tmp_path)
    save(root, OLD, step=1)
    done = save(root, NEW, step=2, cut=flat_bucket, ranks=2, piece_bytes=200)
    change, message = DAMAGES[case]
    change(tmp_path / done.folder_name)
    report = verify(tmp_path / done.folder_name)
    assert not report.ok
    assert any(re.search(message, problem) for problem in report.problems), report.problems
    with pytest.raises(CheckpointError, match=message):
        read_all(tmp_path / done.folder_name)
    usable = [item for item in root.committed() if verify(item.path, item.digest).ok]
    assert [item.step for item in usable] == [1]
    assert holds(usable[0], OLD)


def read_all(folder: Path) -> None:
    reader = CheckpointReader(folder)
    for name in reader.manifest.tensors:
        reader.read(name)


def test_every_single_flipped_byte_of_a_data_file_is_found(tmp_path: Path) -> None:
    done = save(CheckpointRoot(tmp_path), OLD, piece_bytes=128)
    data = tmp_path / done.folder_name / "rank-00000.bin"
    whole = data.read_bytes()
    for position in range(0, len(whole), 7):
        data.write_bytes(whole)
        flip(position)(data)
        assert len(verify(data.parent).problems) == 1
        with pytest.raises(CheckpointCorrupt, match="is damaged"):
            read_all(data.parent)


FULL_DISK = """
import sys
from pathlib import Path
from stoker.checkpoint.store import CheckpointRoot
from testing.checkpoint.synthetic import make_state, save
state = make_state({"model.w": ((512, 1024), "float32")})
try:
    save(CheckpointRoot(Path(sys.argv[1])), state, step=2, piece_bytes=2**16)
except OSError as error:
    print(error)
    sys.exit(9)
"""


def save_in_child(root: Path, limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", FULL_DISK, str(root)]
    return subprocess.run(command, env=environment, preexec_fn=limit, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("limit_bytes", [0, 1, 4096, 2**20 + 1, 2**21 - 1])
def test_a_file_size_limit_fails_the_save_and_keeps_the_step_before(tmp_path: Path, limit_bytes: int) -> None:
    root = CheckpointRoot(tmp_path)
    save(root, OLD, step=1)
    child = save_in_child(tmp_path, limit_bytes)
    assert child.returncode == 9, child.stderr
    assert "rank-00000.bin" in child.stdout
    assert check_steps(root) == [1]
    assert len(root.discard_unfinished()) == 1
    assert save_in_child(tmp_path).returncode == 0
    assert [item.step for item in root.committed()] == [2, 1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_fails_the_save_and_keeps_the_step_before(small_disk: Path) -> None:
    root = CheckpointRoot(small_disk)
    save(root, OLD, step=1)
    large = make_state({"model.w": ((1024, 1024), "float32")})
    with pytest.raises(OSError, match=r"No space left on device.*rank-00000\.bin"):
        save(root, large, step=2, piece_bytes=2**16)
    assert check_steps(root) == [1]
    assert len(root.discard_unfinished()) == 1
    save(root, NEW, step=2, writer=NEXT_WRITER)
    assert check_steps(root) == [2, 1]


@pytest.mark.parametrize("full_at", range(25))
def test_a_disk_that_fails_at_any_operation_fails_the_save_or_publishes_it_whole(tmp_path: Path, full_at: int) -> None:
    root = CheckpointRoot(tmp_path)
    save(root, OLD, step=1)
    failing = CrashingStorage(FullDisk(full_at))
    with suppress(OSError):
        save(CheckpointRoot(tmp_path, storage=failing), NEW, step=2, cut=flat_bucket, ranks=2, piece_bytes=256)
    assert failing.countdown.left < 0
    assert check_steps(root) in ([1], [2, 1])
    root.discard_unfinished()
    if check_steps(root) == [2, 1]:
        with pytest.raises(CheckpointExists):
            save(root, NEW, step=2, writer=WRITER)
