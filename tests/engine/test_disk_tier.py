"""The disk tier by itself: its index against a model, its files under every failure, its folders."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.blocks import BlockContent
from stoker.engine.core.disk.block_folder import SUFFIX, UNFINISHED, BlockFolder, Files, file_bytes
from stoker.engine.core.disk.breaker import Breaker
from stoker.engine.core.disk.disk_index import HIGH, LOW, DiskIndex
from stoker.engine.core.disk.disk_tier import HANGS_S
from stoker.engine.core.disk.lane import FREE_S, LOCK, TAG_DIGITS, remove_unused, take_lane
from stoker.engine.core.disk.lane_home import whole_blocks
from stoker.engine.transfer.block_part import part_of
from stoker.engine.transfer.checksum import content_seed, raw_sums, seeded
from stoker.engine.transfer.landing_zone import BlockRefused
from stoker.engine.transfer.layout import BlockLayout
from stoker.engine.transfer.port import LayoutMismatch
from stoker.engine.transfer.repack import repack
from stoker.engine.transfer.ticket import TransferError
from testing.engine.cold_blocks import IDENTITY, WHOLE, DiskBench, block_of, content_of, sum_of
from testing.engine.faulty_files import FaultyFiles, Killed, failing, full, killed_at
from testing.engine.transfers import FINGERPRINT, LAYOUT

NAMES = [bytes([number]) * 32 for number in range(12)]
OPERATIONS = st.tuples(
    st.sampled_from(["write", "complete", "fail", "pin", "unpin", "drop", "removed"]), st.sampled_from(NAMES)
)


class Model:
    """What the index should do, in the plainest form: a list in the order of use."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stored: OrderedDict[bytes, int] = OrderedDict()
        self.writing: set[bytes] = set()
        self.leaving: set[bytes] = set()
        self.pins: dict[bytes, int] = {}

    def make_room(self) -> list[bytes]:
        taken = len(self.stored) + len(self.writing) + 1
        if taken <= HIGH * self.size:
            return []
        unpinned = [name for name in self.stored if not self.pins.get(name)]
        return unpinned[: taken - int(LOW * self.size)]


def apply(index: DiskIndex, model: Model, operation: str, name: bytes) -> None:
    """Do one thing to both, and compare what they answer."""
    match operation:
        case "write":
            evicted = model.make_room()
            assert [one.digest for one in index.make_room()] == evicted
            for one in evicted:
                del model.stored[one]
                model.leaving.add(one)
            used = len(model.stored) + len(model.writing) + len(model.leaving)
            known = name in model.stored or name in model.writing or name in model.leaving
            if name in model.stored:
                model.stored.move_to_end(name)
            assert index.begin_write(name) == (not known and used < model.size)
            if not known and used < model.size:
                model.writing.add(name)
        case "complete" | "fail" if name in model.writing:
            index.end_write(name, WHOLE if operation == "complete" else None)
            model.writing.remove(name)
            if operation == "complete":
                model.stored[name] = 0
        case "pin" if name in model.stored:
            index.pin(name)
            model.pins[name] = model.pins.get(name, 0) + 1
        case "unpin" if model.pins.get(name):
            index.unpin(name)
            model.pins[name] -= 1
            if name in model.stored:
                model.stored.move_to_end(name)
        case "drop":
            assert index.drop(name) == (name in model.stored)
            if model.stored.pop(name, None) is not None:
                model.leaving.add(name)
        case "removed":
            index.removed(name)
            model.leaving.discard(name)


@settings(deadline=None, max_examples=150)
@given(size=st.integers(1, 9), operations=st.lists(OPERATIONS, max_size=80))
def test_the_index_does_what_a_plain_model_does(size: int, operations: list[tuple[str, bytes]]) -> None:
    index, model = DiskIndex(size), Model(size)
    for operation, name in operations:
        apply(index, model, operation, name)
        assert not list(index.faults())
        assert {one for one in NAMES if index.has(one)} == set(model.stored)
        assert index.num_used == len(model.stored) + len(model.writing) + len(model.leaving) <= size


def folder_at(path: Path, files: Files | None = None, identity: BlockIdentity = IDENTITY) -> BlockFolder:
    return BlockFolder(path, identity, files)


def store(folder: BlockFolder, *numbers: int) -> None:
    folder.prepare()
    for number in numbers:
        folder.write(
            content_of(number, folder.identity),
            folder.identity.layout,
            block_of(number),
            sum_of(number, folder.identity),
        )


def sound(folder: BlockFolder, number: int) -> bool:
    """Whether a block can be read. What is read is what was written."""
    into = np.zeros(LAYOUT.block_bytes, dtype=np.uint8)
    try:
        raw = folder.read(content_of(number, folder.identity), WHOLE, LAYOUT, into)
    except (OSError, TransferError, BlockRefused):
        return False
    assert (raw, into.tobytes()) == (int(raw_sums(block_of(number)[None])[0]), block_of(number).tobytes())
    return True


def test_what_was_written_is_found_and_read_also_by_another_engine(tmp_path: Path) -> None:
    store(folder_at(tmp_path), 1, 2, 3)
    folder = folder_at(tmp_path)
    for place, number in enumerate((1, 2, 3)):
        os.utime(next(tmp_path.rglob(content_of(number).digest.hex() + SUFFIX)), (place, place))
    assert sound(folder, 1), "which makes it the last used"
    folder.prepare()
    found = [one.digest for one in folder.scan()]
    assert found[-1] == content_of(1).digest
    assert set(found) == {content_of(number).digest for number in (1, 2, 3)}
    assert all(path.stat().st_size <= file_bytes(IDENTITY, WHOLE) for path in tmp_path.rglob(f"*{SUFFIX}"))
    folder.remove(content_of(2).digest, WHOLE)
    assert [sound(folder, number) for number in (1, 2, 3)] == [True, False, True]


@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, fingerprint=FINGERPRINT[::-1]),
        replace(IDENTITY, salt="other"),
        replace(IDENTITY, layout=replace(LAYOUT, first_layer=1, end_layer=3)),
    ],
    ids=["weights", "tenant", "layers"],
)
def test_blocks_of_another_identity_are_refused_even_under_the_right_name(other: BlockIdentity, tmp_path: Path) -> None:
    theirs, ours = folder_at(tmp_path / "theirs", identity=other), folder_at(tmp_path / "ours")
    store(theirs, 1)
    store(ours, 1)
    (file,) = theirs.path.rglob(f"*{SUFFIX}")
    next(ours.path.rglob(f"*{SUFFIX}")).write_bytes(file.read_bytes())
    with pytest.raises(LayoutMismatch):
        ours.read(content_of(1), WHOLE, LAYOUT, np.zeros(LAYOUT.block_bytes, dtype=np.uint8))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("tokens", content_of(1)._replace(tokens=content_of(2).tokens)),
        ("parent", content_of(1)._replace(parent=b"p" * 32)),
    ],
)
def test_the_tokens_themselves_are_compared_and_not_only_their_digest(
    field: str, other: BlockContent, tmp_path: Path
) -> None:
    folder = folder_at(tmp_path)
    store(folder, 1)
    with pytest.raises(LayoutMismatch, match=field):
        folder.read(other, WHOLE, LAYOUT, np.zeros(LAYOUT.block_bytes, dtype=np.uint8))


@settings(deadline=None, max_examples=60)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_a_file_that_was_cut_or_changed_is_never_read(
    place: float, flip: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = folder_at(tmp_path_factory.mktemp("folder"))
    store(folder, 1)
    (file,) = folder.path.rglob(f"*{SUFFIX}")
    data = bytearray(file.read_bytes())
    at = int(place * len(data))
    if flip:
        data[at] ^= flip
    else:
        del data[at:]
    file.write_bytes(data)
    assert not sound(folder, 1)


def test_a_process_that_is_killed_at_any_point_leaves_whole_blocks_or_none(tmp_path: Path) -> None:
    """The operations of opening, three writes and a removal, ended at each of them; then another process opens it."""
    for point in range(10_000):
        path = tmp_path / str(point)
        with suppress(Killed):
            folder = folder_at(path, FaultyFiles(killed_at(point)))
            store(folder, 1, 2)
            folder.remove(content_of(1).digest, WHOLE)
            store(folder, 3)
            break
        after = folder_at(path)
        after.prepare()
        found = {one.digest for one in after.scan()}
        whole = {content_of(number).digest for number in (1, 2, 3) if sound(after, number)}
        assert found == whole
        assert not list((path / UNFINISHED).iterdir())
    assert point > 20


HALVES = tuple(replace(LAYOUT, first_head=head, end_head=head + 1) for head in range(2))


def test_ranks_that_are_killed_at_any_point_leave_whole_blocks_or_none(tmp_path: Path) -> None:
    """As above, for two ranks that write their halves of each block one after the other."""
    for point in range(10_000):
        path = tmp_path / str(point)
        with suppress(Killed):
            folder = folder_at(path, FaultyFiles(killed_at(point)))
            store(folder)
            for number in (1, 2):
                for layout in HALVES:
                    half_N = np.zeros(layout.block_bytes, dtype=np.uint8)
                    repack([(LAYOUT, {0: block_of(number)})], layout, {0: half_N})
                    content, raw = content_of(number), int(raw_sums(half_N[None])[0])
                    folder.write(content, layout, half_N, seeded(raw, content_seed(folder.root, 0, content.digest)))
            folder.remove(content_of(1).digest, tuple(map(part_of, HALVES)))
            break
        after = folder_at(path)
        after.prepare()
        found = {one.digest: one.parts for one in whole_blocks(after)}
        assert set(found) == {content_of(number).digest for number in (1, 2) if sound_in(after, number, HALVES)}
        assert len(list(path.rglob(f"*{SUFFIX}"))) == 2 * len(found), "other halves are gone"
    assert point > 20


def sound_in(folder: BlockFolder, number: int, layouts: tuple[BlockLayout, ...]) -> bool:
    """As `sound`, where the parts have these layouts."""
    into = np.zeros(LAYOUT.block_bytes, dtype=np.uint8)
    with suppress(FileNotFoundError):
        folder.read(content_of(number), tuple(map(part_of, layouts)), LAYOUT, into)
        assert into.tobytes() == block_of(number).tobytes()
        return True
    return False


def test_strange_files_are_removed_and_those_of_others_left_alone(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    store(folder, 1)
    name = content_of(1).digest.hex()
    (tmp_path / name[:2] / "note").write_text("x")
    for odd in (name.upper(), f"{name}.0-2.0-2", f"{name}.0-3.0-1", f"{name}.0-02.0-1", f"{name}.1-1.0-1"):
        (tmp_path / name[:2] / f"{odd}{SUFFIX}").write_text("x")
    (tmp_path / "theirs").write_text("x")
    assert [one.digest for one in folder.scan()] == [content_of(1).digest]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted([f"{name}{SUFFIX}", "theirs"])


def test_a_folder_among_the_files_stays_and_the_others_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = DiskBench(tmp_path)
    assert first.write(1)
    first.tier.close()
    (lane,) = tmp_path.iterdir()
    digests = [content_of(number).digest.hex() for number in (1, 2)]
    odd = [lane / UNFINISHED / "kept", lane / digests[0][:2] / "kept", lane / digests[1][:2] / f"{digests[1]}{SUFFIX}"]
    for folder in odd:
        folder.mkdir(parents=True)
        (folder / "data").write_text("x")
    again = DiskBench(tmp_path)
    assert again.tier.state == "ok"
    assert again.read(1)
    assert again.tier.stats().blocks == 1
    again.tier.close()
    assert [(folder / "data").read_text() for folder in odd] == ["x"] * 3
    assert [sum(f"{folder} is a folder among files" in text for text in caplog.messages) for folder in odd] == [1, 1, 1]


def test_a_folder_in_place_of_a_block_gives_way_and_keeps_its_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = DiskBench(tmp_path)
    assert bench.write(1)
    (lane,) = tmp_path.iterdir()
    empty, odd = (
        lane / digest[:2] / f"{digest}{SUFFIX}" for digest in (content_of(number).digest.hex() for number in (2, 3))
    )
    for folder in (empty, odd):
        folder.mkdir(parents=True)
    (odd / "data").write_text("x")
    assert bench.write(2)
    assert bench.write(3)
    assert (bench.read(2), bench.read(3), bench.tier.state) == (sum_of(2), sum_of(3), "ok")
    assert [path.read_text() for path in odd.parent.glob("*.aside-*/data")] == ["x"]
    assert sum(f"{odd} is a folder in place of a cache block" in text for text in caplog.messages) == 1
    odd.unlink()
    odd.mkdir()
    assert bench.read(3) is None, "its file has gone"
    assert bench.tier.stats().state == "ok"
    bench.poll_until(lambda: not bench.tier.busy)
    assert bench.write(3)
    bench.tier.close()


def test_a_number_whose_files_are_no_engine_s_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tag = FINGERPRINT.hex()[:TAG_DIGITS]
    strange = [tmp_path / f"blocks-{tag}-0" / LOCK, tmp_path / f"blocks-{'0' * TAG_DIGITS}-0" / LOCK]
    for folder in strange:
        folder.mkdir(parents=True)
    (tmp_path / f"blocks-{tag}-1").write_text("x")
    with take_lane(tmp_path, FINGERPRINT) as lane:
        assert lane.path.name == f"blocks-{tag}-2"
        assert remove_unused(tmp_path, FINGERPRINT, time.time() + 2 * FREE_S) == 0
    assert all(folder.is_dir() for folder in strange)
    assert (tmp_path / f"blocks-{tag}-1").read_text() == "x"
    assert [f"blocks-{tag}-{number} is left out" in text for number, text in enumerate(caplog.messages)] == [True] * 2


def test_engines_have_folders_of_their_own_and_find_them_again(tmp_path: Path) -> None:
    first, second = take_lane(tmp_path, FINGERPRINT), take_lane(tmp_path, FINGERPRINT)
    assert first.path != second.path
    taken = first.path
    first.close()
    with take_lane(tmp_path, FINGERPRINT) as again:
        assert again.path == taken
    second.close()


def test_folders_that_no_engine_uses_are_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / f"blocks-{'0' * 32}-0").mkdir()
    (tmp_path / f"blocks-{'1' * 32}-0.leaving-{'2' * 32}").mkdir()
    own, other = take_lane(tmp_path, FINGERPRINT), take_lane(tmp_path, b"o" * 32)
    old, fresh = take_lane(tmp_path, FINGERPRINT), take_lane(tmp_path, FINGERPRINT)
    old.close()
    fresh.close()
    now_s = (fresh.path / LOCK).stat().st_mtime
    os.utime(old.path / LOCK, (now_s - FREE_S - 1,) * 2)
    assert remove_unused(tmp_path, FINGERPRINT, now_s) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"mine", own.path.name, other.path.name, fresh.path.name}
    other.close()
    assert remove_unused(tmp_path, FINGERPRINT, now_s) == 1
    own.close()


def test_a_disk_that_fails_is_tried_again_after_a_while() -> None:
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    pauses = []
    for _ in range(8):
        breaker.failed("full")
        breaker.failed("full, too")  # begun before the pause
        begun_s = now[0]
        while not breaker.open:
            now[0] += 0.5
        pauses.append(now[0] - begun_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert breaker.reason == "full"
    breaker.worked()
    assert (breaker.open, breaker.reason) == (True, "")


def test_blocks_survive_a_restart_and_the_oldest_make_room(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, 10)
    assert all(bench.write(number) for number in range(9))
    assert bench.read(0) == sum_of(0), "which makes it the last used"
    assert not bench.write(3), "it is there"
    assert bench.write(9)
    bench.poll_until(lambda: not bench.tier.busy)
    held = [number for number in range(10) if bench.holds(number)]
    assert 0 in held
    assert 9 in held
    assert 1 not in held
    stats = bench.tier.stats()
    assert (stats.state, stats.saved, stats.loaded, stats.evicted) == ("ok", 10, 1, 10 - len(held))
    assert stats.used_bytes <= stats.total_bytes
    bench.tier.close()
    files = sum(path.stat().st_size for path in tmp_path.rglob(f"*{SUFFIX}"))
    assert files <= stats.total_bytes
    again = DiskBench(tmp_path, 10)
    assert again.tier.stats().found == len(held)
    assert [number for number in range(10) if again.holds(number)] == held
    for number in held:
        assert again.read(number) == sum_of(number)
        assert again.slots[number].tobytes() == block_of(number).tobytes()
    again.tier.close()
    smaller = DiskBench(tmp_path, 4)
    smaller.poll_until(lambda: not smaller.tier.busy)
    assert 0 < smaller.tier.stats().blocks <= 4, "a folder that is too large gives up the oldest"
    smaller.tier.close()


@pytest.mark.parametrize(("before", "reason"), [(full, "No space left"), (failing("rename"), "Input/output error")])
def test_a_disk_that_is_full_or_fails_is_left_out_and_used_again(before: object, reason: str, tmp_path: Path) -> None:
    now = [0.0]
    files = FaultyFiles()
    bench = DiskBench(tmp_path, files=files, clock=lambda: now[0])
    assert bench.write(1)
    files.before = before  # type: ignore[assignment]
    assert bench.write(2)
    assert not bench.write(3), "a pause"
    assert reason in bench.tier.stats().state
    assert (bench.tier.stats().failed, bench.tier.stats().saved) == (1, 1)
    assert bench.read(1) == sum_of(1), "reads go on"
    assert not any(list(folder.iterdir()) for folder in tmp_path.rglob(UNFINISHED))
    files.before = lambda _: None
    now[0] += 2
    assert bench.write(2)
    assert bench.tier.stats().state == "ok"
    assert bench.read(2) == sum_of(2)
    bench.tier.close()


def test_blocks_that_cannot_be_read_are_counted_by_cause_and_given_up(tmp_path: Path) -> None:
    now = [0.0]
    files = FaultyFiles()
    bench = DiskBench(tmp_path, files=files, clock=lambda: now[0])
    assert all(bench.write(number) for number in range(5))
    files.change = lambda data: data[:-1]
    assert bench.read(0) is None
    files.change = lambda data: data[:100] + bytes([data[100] ^ 4]) + data[101:]
    assert bench.read(1) is None
    files.change = lambda data: data
    paths = [next(tmp_path.rglob(content_of(number).digest.hex() + SUFFIX)) for number in (2, 3)]
    paths[0].write_bytes(paths[1].read_bytes())
    assert bench.read(2) is None
    paths[1].unlink()
    assert bench.read(3) is None
    stats = bench.tier.stats()
    assert (stats.damaged + stats.foreign, stats.foreign >= 1, stats.failed, stats.state) == (3, True, 1, "ok")
    bench.poll_until(lambda: not bench.tier.busy)
    assert [number for number in range(5) if bench.holds(number)] == [4]
    assert len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 1, "their files are gone"
    files.before = failing("read")
    assert bench.read(4) is None
    assert "Input/output error" in bench.tier.stats().state
    assert not bench.tier.readable
    bench.tier.close()


def test_a_disk_that_hangs_is_left_out_and_not_waited_for_at_the_end(tmp_path: Path) -> None:
    now = [0.0]
    answers = threading.Event()
    files = FaultyFiles()
    bench = DiskBench(tmp_path, files=files, clock=lambda: now[0])
    assert bench.write(1)
    files.before = lambda kind: None if kind != "create" else (answers.wait(120), None)[1]
    for number in (2, 3):
        assert bench.tier.room()
        assert bench.tier.write(bench.entry(number))
    now[0] += HANGS_S + 1
    assert bench.tier.room() == 0
    assert "hangs" in bench.tier.stats().state
    assert bench.read(1) == sum_of(1), "reads have threads of their own"
    answers.set()
    bench.poll_until(lambda: not bench.tier.busy)
    assert bench.tier.stats().state == "ok"
    assert bench.read(3) == sum_of(3)
    answers.clear()
    assert bench.tier.write(bench.entry(4))
    now[0] += HANGS_S + 1
    bench.tier.close()  # returns at once
    answers.set()


def test_a_folder_that_cannot_be_opened_is_tried_again(tmp_path: Path) -> None:
    now = [0.0]
    path = tmp_path / "file"
    path.write_text("not a folder")
    bench = DiskBench(path, clock=lambda: now[0])
    assert "Error" in bench.tier.stats().state
    assert (bench.tier.readable, bench.tier.room()) == (False, 0)
    path.unlink()
    now[0] += 2
    bench.poll_until(lambda: bench.tier.state == "ok")
    assert bench.write(1)
    bench.tier.close()
