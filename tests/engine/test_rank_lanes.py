"""The disk of a copy over several pods: every rank keeps its part in a folder of its own; a block is there at all or at
none of them."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.engine.core.disk.block_folder import SUFFIX, file_bytes
from stoker.engine.core.disk.cold_tier import ReadEnd
from stoker.engine.core.disk.rank_files import RankFiles
from stoker.engine.core.disk.rank_lanes import RankLanes, rank_lanes_tier
from stoker.engine.core.host_index import HostEntry
from stoker.engine.transfer.block_part import part_of
from stoker.engine.transfer.checksum import content_seed, seeded
from testing.engine.cold_blocks import IDENTITY, WAIT_S, block_of, content_of
from testing.engine.faulty_files import failing, full
from testing.engine.ranks_beside import WIDTHS, RanksBeside, Width

WIDE: tuple[Width, ...] = ("tensor 2", "tensor 4", "pipeline 2", "tensor 2, pipeline 2")


def nothing(_: str) -> None:
    """What happens before an operation of a sound file system."""


def lanes_of(ranks: RanksBeside) -> RankLanes:
    carried = ranks.carrier(IDENTITY)()
    assert isinstance(carried, RankFiles)
    return RankLanes(carried.calls, carried.layouts, carried.root)


class LaneBench:
    """Ranks of two pods and the disk tier of their leader."""

    def __init__(
        self, path: Path, width: Width = "tensor 2", max_blocks: int = 100, before: Callable[[str], None] = nothing
    ) -> None:
        """`before`: of the first rank's files."""
        self.now_s = 0.0
        self.sums: dict[int, int] = {}
        """Of the blocks that were written."""
        self.ranks = RanksBeside(WIDTHS[width], 40, apart=True)
        self.ranks.files_of(0).before = before
        lanes = lanes_of(self.ranks)
        self.block_bytes = lanes.file_bytes(IDENTITY, 2)
        self.tier = rank_lanes_tier(path, IDENTITY, lanes, max_blocks, self.block_bytes, lambda: self.now_s)
        self.poll_until(lambda: self.tier.state != "opening")

    def poll_until(self, condition: Callable[[], bool]) -> None:
        until_s = time.monotonic() + WAIT_S
        while not condition():
            self.tier.poll()
            assert time.monotonic() < until_s
            time.sleep(0.001)

    def write(self, number: int) -> bool:
        """Write a block, and wait for the end. Whether it is there."""
        raw = self.ranks.fill(number, block_of(number))
        content = content_of(number)
        self.sums[number] = seeded(raw, content_seed(IDENTITY.root, 0, content.digest))
        if not self.tier.room() or not self.tier.write(HostEntry(content, number, self.sums[number])):
            return False
        self.poll_until(lambda: not self.tier.busy)
        return self.tier.holds(content)

    def read(self, number: int) -> int | None:
        """Read a block into empty slots; its sum, or None."""
        self.ranks.clear(number)
        self.tier.read(HostEntry(content_of(number), number))
        ends: list[ReadEnd] = []

        def ended() -> bool:
            ends.extend(self.tier.poll()[1])
            return bool(ends)

        self.poll_until(ended)
        self.poll_until(lambda: not self.tier.busy)
        return ends[0].sum

    def close(self) -> None:
        self.tier.close()
        self.ranks.close()


def files(path: Path, number: int | None = None) -> list[Path]:
    name = "" if number is None else content_of(number).digest.hex()
    return sorted(path.rglob(f"{name}*{SUFFIX}"))


@pytest.mark.parametrize("width", WIDE)
def test_every_rank_writes_and_reads_its_own_part(width: Width, tmp_path: Path) -> None:
    bench = LaneBench(tmp_path, width)
    assert all(bench.write(number) for number in range(3))
    folders = [{file.parent.parent for file in files(tmp_path, number)} for number in range(3)]
    assert len(folders[0]) == len(bench.ranks.layouts)
    assert folders[0] == folders[1] == folders[2]
    parts = [part_of(layout) for layout in bench.ranks.layouts]
    assert bench.block_bytes == file_bytes(IDENTITY, tuple(parts[: len(parts) // 2])), "of one pod's disk"
    for number in range(3):
        assert bench.read(number) == bench.sums[number]
        assert bench.ranks.block(number).tobytes() == block_of(number).tobytes()
    bench.close()


@pytest.mark.parametrize(
    ("spoil", "counted"),
    [(Path.unlink, "failed"), (lambda file: file.write_bytes(file.read_bytes()[:-9]), "damaged")],
    ids=["a missing part", "a damaged part"],
)
def test_a_block_that_lacks_a_part_at_one_rank_is_given_up_at_all(
    spoil: Callable[[Path], object], counted: str, tmp_path: Path
) -> None:
    bench = LaneBench(tmp_path)
    assert bench.write(1)
    assert bench.write(2)
    spoil(files(tmp_path, 1)[-1])
    assert bench.read(1) is None
    assert not bench.tier.holds(content_of(1))
    assert files(tmp_path, 1) == []
    stats = bench.tier.stats()
    assert (getattr(stats, counted), stats.blocks, stats.state) == (1, 1, "ok")
    assert bench.read(2) == bench.sums[2]
    assert bench.write(1), "it may come again"
    bench.close()


def test_a_block_that_one_rank_cannot_write_leaves_nothing_at_the_others(tmp_path: Path) -> None:
    bench = LaneBench(tmp_path)
    bench.ranks.files_of(1).before = full
    assert not bench.write(1)
    assert "rank 1" in bench.tier.state
    assert "No space left" in bench.tier.state
    bench.poll_until(lambda: not files(tmp_path))
    bench.ranks.files_of(1).before = nothing
    bench.now_s += 2
    assert bench.write(1)
    bench.close()


def test_the_oldest_make_room_at_every_rank(tmp_path: Path) -> None:
    bench = LaneBench(tmp_path, max_blocks=10)
    for number in range(14):
        bench.write(number)
    held = [number for number in range(14) if bench.tier.holds(content_of(number))]
    assert 0 < len(held) <= 10
    assert [len(files(tmp_path, number)) for number in range(14)] == [2 * (number in held) for number in range(14)]
    bench.close()


def test_a_replica_that_starts_again_begins_with_empty_folders(tmp_path: Path) -> None:
    """Whatever a pod still has: the others may not have what belongs to it."""
    bench = LaneBench(tmp_path)
    assert bench.write(1)
    bench.close()
    first, second = sorted(path for path in tmp_path.iterdir())
    shutil.rmtree(second)
    again = LaneBench(tmp_path)
    assert not again.tier.holds(content_of(1))
    assert files(tmp_path) == []
    assert {first, second} == set(tmp_path.iterdir()), "they are taken again"
    assert again.tier.stats().found == 0
    assert again.write(1)
    again.close()


def test_a_folder_that_one_rank_cannot_open_is_tried_again(tmp_path: Path) -> None:
    bench = LaneBench(tmp_path, before=failing("make_folder"))
    assert bench.tier.state.startswith("rank 0: OSError")
    assert (bench.tier.readable, bench.tier.room()) == (False, 0)
    bench.ranks.files_of(0).before = nothing
    bench.now_s += 2
    bench.poll_until(lambda: bench.tier.state == "ok")
    assert bench.write(1)
    bench.close()


def test_what_waits_for_ranks_ends_with_the_engine(tmp_path: Path) -> None:
    lanes = lanes_of(RanksBeside(WIDTHS["tensor 2"], 40))
    asked = lanes.ask(lambda call: pytest.fail(f"not begun: {call}"))
    lanes.close(0)
    with pytest.raises(OSError, match="the engine ends"):
        asked.result(0)
    late: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: late.append(lanes.ask(lambda _: pytest.fail("closed")).exception(WAIT_S)))
    thread.start()
    thread.join()
    assert isinstance(late[0], OSError)
    assert list(tmp_path.iterdir()) == []
