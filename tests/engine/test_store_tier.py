"""The store that engines share: replicas, repair, clean-up, and any history of engines, volumes and files."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.disk.block_folder import SUFFIX, UNFINISHED, Found, file_bytes
from stoker.engine.core.disk.cold_tier import ReadEnd
from stoker.engine.core.disk.disk_tier import HANGS_S, DiskTier
from stoker.engine.core.disk.shared_home import LEASE_S, UNFINISHED_S, USED, SharedHome, due
from stoker.engine.core.disk.shared_index import SharedIndex
from stoker.engine.core.disk.store_tier import StoreTier, ranked
from stoker.engine.core.host_index import HostEntry
from stoker.engine.transfer.checksum import content_seed, seeded
from testing.engine.cold_blocks import IDENTITY, WAIT_S, WHOLE, block_of, content_of
from testing.engine.faulty_files import FaultyFiles, failing, full
from testing.engine.ranks_beside import WIDTHS, OneRank, RanksBeside, Width
from testing.engine.transfers import FINGERPRINT, wait_for

TTL_S = 3600
NUM_SLOTS = 40


class StoreBench:
    """One engine's end of a store, with as many slots of a host tier as there are numbers."""

    def __init__(
        self, paths: list[Path], replicas: int, *, max_blocks: int = 100, clock: Callable[[], float] = lambda: 0.0,
        unix_time: Callable[[], float] = time.time, identity: BlockIdentity = IDENTITY, width: Width = "one",
    ) -> None:  # fmt: skip
        self.slots = OneRank(NUM_SLOTS) if width == "one" else RanksBeside(WIDTHS[width], NUM_SLOTS)
        self.identity = identity
        self.files = {path.name: FaultyFiles() for path in paths}
        homes = {
            path.name: SharedHome(path, identity, max_blocks, TTL_S, self.files[path.name], unix_time) for path in paths
        }
        carrier = self.slots.carrier(identity)
        volumes = {}
        for name, home in homes.items():
            blocks = carrier()
            size = file_bytes(identity, blocks.parts)
            volumes[name] = DiskTier(home, SharedIndex(max_blocks), blocks, size, clock)
        self.homes = homes
        self.tier = StoreTier(volumes, replicas)
        self.settle()

    def settle(self) -> None:
        """Wait for all that is under way."""
        until_s = time.monotonic() + WAIT_S
        while self.tier.busy or "opening" in self.tier.stats().state:
            self.tier.poll()
            assert time.monotonic() < until_s
            time.sleep(0.0005)

    def look(self) -> None:
        """List the volumes anew, as happens every two seconds."""
        until_s = time.monotonic() + WAIT_S
        for volume in self.tier.volumes.values():
            before = volume.num_tended
            while volume.num_tended < before + 2 and volume.tend_now():  # the first may have begun before
                self.tier.poll()
                assert time.monotonic() < until_s
                time.sleep(0.0005)

    def entry(self, number: int) -> HostEntry:
        """A block in its slot of the host tier."""
        content = content_of(number, self.identity)
        raw = self.slots.fill(number, block_of(number))
        return HostEntry(content, number, seeded(raw, content_seed(self.identity.root, 0, content.digest)))

    def write(self, number: int) -> bool:
        begun = bool(self.tier.room()) and self.tier.write(self.entry(number))
        self.settle()
        return begun

    def read(self, number: int) -> bool:
        """Whether a block could be read; what is read is what was written."""
        expected = self.entry(number).sum
        entry = HostEntry(content_of(number, self.identity), number)
        if not self.tier.holds(entry.content):
            return False
        self.slots.clear(number)
        self.tier.read(entry)
        until_s = time.monotonic() + WAIT_S
        ends: list[ReadEnd] = []
        while not ends:
            ends = [end for end in self.tier.poll()[1] if end.entry is entry]
            assert time.monotonic() < until_s
        if ends[0].sum is None:
            return False
        assert ends[0].sum == expected
        assert self.slots.block(number).tobytes() == block_of(number).tobytes()
        return True


def volumes_at(path: Path, count: int) -> list[Path]:
    paths = [path / f"v{number}" for number in range(count)]
    for one in paths:
        one.mkdir()
    return paths


def file_of(path: Path, number: int) -> Path | None:
    return next(path.rglob(content_of(number).digest.hex() + SUFFIX), None)


def holders(paths: list[Path], number: int) -> list[str]:
    return [path.name for path in paths if file_of(path, number) is not None]


def test_what_one_engine_writes_the_others_read_from_any_replica(tmp_path: Path) -> None:
    paths = volumes_at(tmp_path, 3)
    first, second = StoreBench(paths, 2), StoreBench(paths, 2)
    for number in range(12):
        assert first.write(number)
        preferred = ranked(content_of(number).digest, first.tier.volumes)
        assert holders(paths, number) == sorted(preferred[:2])
    assert not first.write(0), "it is there"
    assert not second.read(0), "not listed yet"
    second.look()
    assert all(second.read(number) for number in range(12))
    shutil.rmtree(paths[0])
    assert all(second.read(number) for number in range(12)), "each has another replica"
    assert second.tier.stats().damaged == 0
    counts = [sum(path.name in holders(paths, number) for number in range(12)) for path in paths]
    assert counts[0] == 0
    assert min(counts[1:]) > 0
    for bench in (first, second):
        bench.tier.close()


def test_engines_of_any_width_read_what_those_of_any_other_wrote(tmp_path: Path) -> None:
    for writer in WIDTHS:
        (tmp_path / writer).mkdir()
        first = StoreBench([tmp_path / writer], 1, width=writer)
        assert first.write(1)
        assert len(list((tmp_path / writer).rglob(f"*{SUFFIX}"))) == len(set(WIDTHS[writer])), "heads twice, once there"
        for reader in WIDTHS:
            second = StoreBench([tmp_path / writer], 1, width=reader)
            assert second.read(1), f"{writer} read by {reader}"
            assert not second.write(1), "it is there"
            second.tier.close()
        first.tier.close()


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("reader", ["one", "tensor 2", "tensor 2, pipeline 2"])
@pytest.mark.parametrize(("harm", "damaged"), [(cut_off, 1), (Path.unlink, 0)], ids=["damaged", "missing"])
def test_a_block_with_a_bad_part_is_refused_counted_and_written_again(
    harm: Callable[[Path], None], damaged: int, reader: Width, tmp_path: Path
) -> None:
    paths = volumes_at(tmp_path, 1)
    writer, bench = StoreBench(paths, 1, width="tensor 2, pipeline 2"), StoreBench(paths, 1, width=reader)
    assert writer.write(1)
    bench.look()
    harm(sorted(tmp_path.rglob(f"*{SUFFIX}"))[2])
    assert not bench.read(1)
    stats = bench.tier.stats()
    assert (stats.damaged, stats.failed, stats.loaded, stats.state) == (damaged, 1 - damaged, 0, "ok")
    bench.settle()
    bench.look()
    assert not bench.read(1), "it is no block any more"
    assert bench.write(1)
    writer.look()
    assert writer.read(1)
    for one in (bench, writer):
        one.tier.close()


@pytest.mark.parametrize(("fault", "reason"), [(full, "No space left"), (failing("rename"), "Input/output error")])
def test_a_disk_that_fails_at_a_rank_is_left_out_and_used_again(
    fault: Callable[[str], None], reason: str, tmp_path: Path
) -> None:
    now = [0.0]
    bench = StoreBench(volumes_at(tmp_path, 1), 1, width="tensor 2", clock=lambda: now[0])
    assert isinstance(bench.slots, RanksBeside)
    bench.slots.files.before = fault
    assert bench.write(1)
    stats = bench.tier.stats()
    assert (stats.failed, stats.saved) == (1, 0)
    assert "rank 0: OSError" in stats.state
    assert reason in stats.state
    assert not bench.write(2), "a pause"
    assert not bench.read(1)
    bench.slots.files.before = lambda _: None
    now[0] += 2
    assert bench.write(1)
    assert bench.read(1)
    assert bench.tier.stats().state == "ok"
    bench.tier.close()


def test_parts_of_a_block_that_was_not_finished_are_no_block_and_are_removed(tmp_path: Path) -> None:
    now = [0.0]
    (path,) = volumes_at(tmp_path, 1)
    bench = StoreBench([path], 1, width="pipeline 2", clock=lambda: now[0])
    assert isinstance(bench.slots, RanksBeside)
    bench.slots.lost.add(0)
    assert bench.tier.write(bench.entry(1))
    wait_for(lambda: len(list(path.rglob(f"*{SUFFIX}"))) == 1, "the part of the rank that goes on")
    now[0] += HANGS_S + 1
    bench.tier.close()
    other = StoreBench([path], 1)
    other.look()
    assert not other.tier.holds(content_of(1))
    home = other.homes["v0"]
    home.sweep()
    assert len(list(path.rglob(f"*{SUFFIX}"))) == 1, "its engine may still write the other part"
    (part,) = path.rglob(f"*{SUFFIX}")
    os.utime(part, (time.time() - UNFINISHED_S - 1,) * 2)
    home.sweep()
    assert not list(path.rglob(f"*{SUFFIX}"))
    other.tier.close()


def test_a_block_that_lacks_a_replica_gets_it_when_it_is_used(tmp_path: Path) -> None:
    paths = volumes_at(tmp_path, 3)
    bench = StoreBench(paths, 2)
    assert bench.write(1)
    first, second = ranked(content_of(1).digest, bench.tier.volumes)[:2]
    damaged = file_of(tmp_path / first, 1)
    assert damaged is not None
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert bench.read(1), "the second replica answers"
    assert bench.tier.stats().damaged == 1
    bench.settle()
    assert holders(paths, 1) == [second]
    assert bench.write(1), "which the traffic does for each block that it fetched"
    assert holders(paths, 1) == sorted([first, second])
    bench.tier.close()


def test_the_next_volume_takes_the_part_of_one_that_fails(tmp_path: Path) -> None:
    now = [0.0]
    paths = volumes_at(tmp_path, 3)
    bench = StoreBench(paths, 2, clock=lambda: now[0])
    first, second, third = ranked(content_of(1).digest, bench.tier.volumes)
    bench.files[first].before = full
    assert bench.write(1)
    assert holders(paths, 1) == [second]
    assert f"{first}: OSError" in bench.tier.stats().state
    assert bench.write(1)
    assert holders(paths, 1) == sorted([second, third])
    bench.files[second].before = failing("open", "read")
    assert bench.read(1), "from the third"
    bench.files[third].before = failing("open", "read")
    assert not bench.read(1), "a miss"
    now[0] += 2
    for files in bench.files.values():
        files.before = lambda _: None
    bench.look()
    assert bench.read(1)
    bench.tier.close()


def test_a_store_that_is_not_mounted_is_a_store_without_blocks(tmp_path: Path) -> None:
    now = [0.0]
    paths = [tmp_path / "absent"]
    bench = StoreBench(paths, 1, clock=lambda: now[0])
    assert (bench.tier.readable, bench.tier.room(), bench.write(1), bench.read(1)) == (False, 0, False, False)
    assert "is not mounted" in bench.tier.stats().state
    assert not paths[0].exists(), "nothing is made below an empty mount point"
    paths[0].mkdir()
    now[0] += 2
    bench.tier.poll()
    bench.settle()
    assert bench.write(1)
    bench.tier.close()


FOUND = st.lists(st.floats(0, 1000), max_size=30).map(
    lambda times: [Found(bytes([place]) * 32, used_s, WHOLE) for place, used_s in enumerate(sorted(times))]
)


@given(found=FOUND, max_blocks=st.integers(1, 30), ttl_s=st.floats(60, 900))
def test_what_the_sweeper_removes(found: list[Found], max_blocks: int, ttl_s: float) -> None:
    now_s = 1000.0
    removed = {one.digest for one in due(found, max_blocks, ttl_s, now_s)}
    kept = [one for one in found if one.digest not in removed]
    assert not any(one.digest in removed for one in found if one.used_s >= now_s - LEASE_S), "leases hold"
    assert all(one.used_s >= now_s - ttl_s for one in kept), "none is kept for longer than its time"
    leased = sum(one.used_s >= now_s - LEASE_S for one in found)
    assert len(kept) <= max(max_blocks, leased)
    if removed:
        oldest_kept = min((one.used_s for one in kept), default=now_s)
        assert all(one.used_s <= oldest_kept for one in found if one.digest in removed), "the oldest go first"
    if len(found) <= 0.9 * max_blocks:
        assert removed == {one.digest for one in found if one.used_s < now_s - ttl_s}


def test_clean_up_of_old_blocks_unfinished_files_and_other_fingerprints(tmp_path: Path) -> None:
    now = [time.time() + 10 * TTL_S]
    (path,) = volumes_at(tmp_path, 1)
    bench = StoreBench([path], 1, unix_time=lambda: now[0])
    bench.look()  # the first sweep is over, the next is due in 30 s
    home = bench.homes["v0"]
    old = StoreBench([path], 1, identity=replace(IDENTITY, fingerprint=FINGERPRINT[::-1]))
    assert old.write(7)
    old.tier.close()
    (path / "mine").mkdir()
    assert all(bench.write(number) for number in (1, 2))
    unfinished = home.folder_path / UNFINISHED
    for name, age_s in (("begun", 1), ("given-up", UNFINISHED_S + 1)):
        (unfinished / name).write_text("x")
        os.utime(unfinished / name, (now[0] - age_s,) * 2)
    for number, age_s in ((1, TTL_S + 1), (2, TTL_S - 1)):
        file = file_of(path, number)
        assert file is not None
        os.utime(file, (now[0] - age_s,) * 2)
    assert home.sweep() == 1, "the folder of the other fingerprint was not used for long"
    assert {folder.name for folder in path.iterdir()} == {"mine", home.folder_path.name}
    assert [file.name for file in unfinished.iterdir()] == ["begun"]
    assert (file_of(path, 1), file_of(path, 2) is not None) == (None, True)
    assert (home.folder_path / USED).stat().st_mtime == pytest.approx(now[0])
    with home._sweeping() as first, SharedHome(path, IDENTITY, 9, TTL_S)._sweeping() as second:
        assert (first, second) == (True, False), "one sweeper at a time"
    bench.tier.close()


def test_a_volume_holds_no_more_than_its_size(tmp_path: Path) -> None:
    paths = volumes_at(tmp_path, 1)
    benches = [StoreBench(paths, 1, max_blocks=10) for _ in range(2)]
    for number in range(16):
        benches[number % 2].write(number)
        for bench in benches:
            bench.look()
    assert len(list(paths[0].rglob(f"*{SUFFIX}"))) <= 10
    for file in paths[0].rglob(f"*{SUFFIX}"):
        os.utime(file, (file.stat().st_mtime - 2 * LEASE_S,) * 2)
    benches[0].homes["v0"].sweep()
    assert len(list(paths[0].rglob(f"*{SUFFIX}"))) == 8
    benches[1].look()
    assert benches[1].write(30), "there is room again"
    for bench in benches:
        bench.tier.close()


COMMON = ("write", "read", "read", "look")


@pytest.mark.parametrize("seed", range(6))
def test_any_history_of_engines_volumes_and_files_gives_right_blocks_or_none(seed: int, tmp_path: Path) -> None:
    """Engines of any width write, read, die and come back, also with one rank before the others; files are cut, changed
    and removed; volumes fail and come back empty."""
    rng = random.Random(seed)
    now = [0.0]
    paths = volumes_at(tmp_path, rng.choice([1, 2, 3]))
    replicas = rng.randint(1, len(paths))

    def start() -> StoreBench:
        width = rng.choice(list(WIDTHS))
        return StoreBench(paths, replicas, max_blocks=rng.choice([6, 30]), clock=lambda: now[0], width=width)

    benches = [start() for _ in range(3)]
    assert all(benches[0].write(number) and benches[0].read(number) for number in range(4))
    for _ in range(100):
        bench = rng.choice(benches)
        number = rng.randrange(12)
        match rng.choice([*COMMON * 3, "kill", "rank", "fault", "file", "volume", "sweep", "time"]):
            case "write":
                bench.write(number)
            case "read":
                bench.read(number)
            case "look":
                bench.look()
            case "kill":
                bench.tier.close()
                benches[benches.index(bench)] = start()
            case "rank" if isinstance(bench.slots, RanksBeside):
                entry = bench.entry(number)
                bench.slots.lost.add(rng.randrange(bench.slots.num_ranks))
                if bench.tier.room():
                    bench.tier.write(entry)
                now[0] += HANGS_S + 1  # its engine ends
                bench.tier.close()
                benches[benches.index(bench)] = bench = start()
            case "fault":
                fault = rng.choice([full, failing("open"), failing("rename"), failing("list"), lambda _: None])
                ranks = [bench.slots.files] if isinstance(bench.slots, RanksBeside) else []
                rng.choice([*bench.files.values(), *ranks]).before = fault
            case "file":
                for file in list(rng.choice(paths).rglob(f"*{SUFFIX}"))[:1]:
                    data = file.read_bytes()
                    file.write_bytes(rng.choice([data[: rng.randrange(len(data))], data[:50] + b"!" + data[51:]]))
            case "volume":
                shutil.rmtree(rng.choice(paths), ignore_errors=True)
                for path in paths:
                    path.mkdir(exist_ok=True)
            case "sweep":
                for home in bench.homes.values():
                    home.folder.files = FaultyFiles()
                    home._mark()
                    home.sweep()
            case "time":
                now[0] += rng.choice([0.5, 2.0, 70.0])
        bench.settle()
        assert not list(bench.tier.faults())
    now[0] += 100.0
    last, reader = start(), start()
    if last.write(20):  # unless the volumes are full
        reader.look()
        assert reader.read(20), "after all that, the store works"
    for bench in (*benches, last, reader):
        bench.tier.close()
