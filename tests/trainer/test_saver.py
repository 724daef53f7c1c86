"""Saves of several ranks: a failure of one rank fails the save on all, and leaves no files."""

from __future__ import annotations

import errno
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.checkpoint.manifest import Box, TensorInfo
from stoker.checkpoint.reader import CheckpointReader
from stoker.checkpoint.store import CheckpointRoot
from stoker.pod.causes import Cause
from stoker.trainer.protocol.messages import RequestEvent, SaveEvent
from stoker.trainer.rank.main import cause_of
from stoker.trainer.rank.piece_map import HostPiece
from stoker.trainer.rank.save_group import SaveGroup
from stoker.trainer.rank.saver import SavePlan, Saver
from testing.trainer.rank_world import run_ranks
from testing.trainer.tiny_run import RecordingChannel, context_of, data_parallel

META = {"layout": {}, "learning_rate": 1e-3, "elapsed_s": 7.5}
TENSOR = TensorInfo("model.weight", (8, 1000), "float32")


def plan(step: int, **changes: Any) -> SavePlan:
    return SavePlan(step=step, tokens=step, loss=0.5, reason="interval", tensors=[TENSOR], meta=META, **changes)


def half(rank: int, value: float) -> list[HostPiece]:
    flat = (rank * 4000, (rank + 1) * 4000)
    return [HostPiece(TENSOR, Box.whole(TENSOR.shape), flat, np.full(4000, value, np.float32))]


def save_three_times(rank: int, size: int, folder: str) -> dict[str, Any]:
    context = context_of(data_parallel(size))
    assert context is not None
    channel = context.channel
    assert isinstance(channel, RecordingChannel)
    saver = Saver(
        CheckpointRoot(Path(folder)), "0a1b2c3d", context.save_group, channel, {"config.json": b"{}"}, keep=None
    )
    saver.start(plan(1), lambda: half(rank, 1.0))
    first = saver.wait()
    if rank == 1:  # a disk on which only small files fit
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    saver.start(plan(2, requests=("wanted",) if rank == 0 else ()), lambda: half(rank, 2.0))
    second = saver.wait()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    saver.start(plan(3), lambda: half(rank, 3.0))
    third = saver.wait()
    saver.start(plan(3), lambda: half(rank, 4.0))
    problems = [str(problem) if problem else None for problem in (first, second, third, saver.wait())]
    return {"problems": problems, "events": channel.events}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saver")
    return folder, run_ranks(save_three_times, 2, str(folder))


def test_one_full_disk_fails_the_save_on_every_rank_and_the_next_one_works(
    saved: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, answers = saved
    for answer in answers:
        first, second, third, again = answer["problems"]
        assert (first, third) == (None, None)
        assert "rank-00001.bin" in second
        assert "exists" in again
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        "step-00000001.0a1b2c3d",
        "step-00000003.0a1b2c3d",
    ]


def test_rank_0_reports_and_answers_the_request(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    leader, other = (answer["events"] for answer in saved[1])
    assert other == []
    states = [(event.step, event.state, event.verified) for event in leader if isinstance(event, SaveEvent)]
    good: list[tuple[str, bool | None]] = [("Saving", None), ("Committed", None), ("Committed", True)]
    bad: list[tuple[str, bool | None]] = [("Saving", None), ("Failed", None)]
    steps = [(1, good), (2, bad), (3, good), (3, bad)]
    assert states == [(step, *state) for step, states_ in steps for state in states_]
    (answer,) = [event for event in leader if isinstance(event, RequestEvent)]
    assert (answer.id, answer.state, answer.folder) == ("wanted", "Failed", "")


def test_a_committed_save_says_what_a_checkpoint_object_shows(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    events = [event for event in saved[1][0]["events"] if isinstance(event, SaveEvent) and event.step == 1]
    figures = [(event.learning_rate, event.elapsed_s, event.bytes, event.files, event.pieces) for event in events]
    assert figures == [(1e-3, 7.5, 0, 0, 0), *[(1e-3, 7.5, 32_002, 3, 2)] * 2], "two ranks' files and config.json"


def test_the_pieces_of_both_ranks_make_the_tensor(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    for step in (1, 3):
        reader = CheckpointReader(saved[0] / f"step-{step:08d}.0a1b2c3d")
        np.testing.assert_array_equal(reader.read(TENSOR.name), np.full(TENSOR.shape, float(step), np.float32))
        assert reader.read_file("config.json") == b"{}"


class LosesItsPeer(SaveGroup):
    """A group whose other rank dies: the gathers after the first ones fail."""

    def __init__(self, gathers: int) -> None:
        super().__init__(0, 1, None)
        self._left = gathers

    def gather(self, value: Any) -> list[Any]:
        if self._left == 0:
            raise RuntimeError("[pair.cc:547] Connection closed by peer [10.0.0.2]:4711")
        self._left -= 1
        return super().gather(value)


def save_and_lose_the_peer(folder: Path, gathers: int) -> tuple[Exception | None, list[Any]]:
    channel = RecordingChannel()
    saver = Saver(CheckpointRoot(folder), "0a1b2c3d", LosesItsPeer(gathers), channel, {}, keep=None)
    saver.start(plan(1, requests=("wanted",)), lambda: [*half(0, 1.0), *half(1, 1.0)])
    return saver.wait(), channel.events


def test_a_full_volume_is_named_with_what_a_save_needs_and_what_was_free(tmp_path: Path) -> None:
    def pieces_until_full() -> Iterator[HostPiece]:
        yield half(0, 1.0)[0]
        raise OSError(errno.ENOSPC, "No space left on device", "rank-00000.bin")

    channel = RecordingChannel()
    root = CheckpointRoot(tmp_path)
    saver = Saver(root, "0a1b2c3d", SaveGroup(0, 1, None), channel, {}, keep=None)
    saver.start(plan(1), lambda: [*half(0, 1.0), *half(1, 1.0)])
    assert saver.wait() is None
    saver.start(plan(2), pieces_until_full)
    found = str(saver.wait())
    assert f"No space left on device: a save needs 32,000 bytes in {tmp_path}, " in found
    assert re.search(r", [1-9][0-9,]+ were free when it began: 'rank-00000.bin'", found)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000001.0a1b2c3d"]
    assert np.all(CheckpointReader(tmp_path / "step-00000001.0a1b2c3d").read(TENSOR.name) == 1.0)


def test_a_peer_lost_in_a_save_is_no_fault_of_the_storage(tmp_path: Path) -> None:
    problem, events = save_and_lose_the_peer(tmp_path, gathers=0)
    assert problem is not None
    assert cause_of(problem) == Cause.PEER_LOST
    assert [event.state for event in events] == ["Saving", "Failed", "Failed"]
    assert CheckpointRoot(tmp_path).committed() == []


def test_a_peer_lost_while_a_save_is_read_back_leaves_it_committed_and_answered(tmp_path: Path) -> None:
    problem, events = save_and_lose_the_peer(tmp_path, gathers=1)
    assert problem is not None
    assert cause_of(problem) == Cause.PEER_LOST
    *saves, answer = events
    assert [(event.state, event.verified) for event in saves] == [
        ("Saving", None),
        ("Committed", None),
        ("Committed", None),
    ]
    assert "closed by peer" in saves[-1].detail
    (found,) = CheckpointRoot(tmp_path).committed()
    assert (answer.state, answer.folder) == ("Done", found.path.name)
