"""A replica of two pods: it answers as one rank does, and a rank of the other pod that hangs ends it with its name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from stoker.engine.core.build import build_engine
from stoker.engine.core.disk.block_folder import SUFFIX
from stoker.engine.core.engine import LLMEngine
from stoker.engine.errors import ExecutorLost
from stoker.engine.ranks.pod_place import find_place
from stoker.engine.ranks.watch import RankLimits
from stoker.engine.ranks.workers import Workers
from stoker.engine.sampling import SamplingParams
from stoker.pod.causes import EXIT_CODES, Cause
from testing.engine.audits import assert_sound
from testing.engine.rank_engines import answers, beside, closed, config_of, saved, started, tokens_of
from tests.engine.test_cold_blocks import opened, settle
from tests.engine.test_rank_tier import answers as tier_answers
from tests.engine.test_rank_tier import tier_config

LONG_S = 400


class TwoPods:
    """The leader's engine in this process, and the program of pod 1."""

    def __init__(self, folder: Path, more: Mapping[str, Any] = MappingProxyType({}), **parallelism: int) -> None:
        """`more`: sections of the configuration."""
        (folder / "key").write_text("5a" * 32)
        replica = {"pods": 2, "key_file": str(folder / "key")}
        self.folder = folder
        self.config = config_of(
            folder, 1, deterministic=True, replica=replica, grace_period_s=4, parallelism=parallelism, **more
        )
        self.engine, self.plan = build_engine(self.config, start=self._start)

    def _start(self, size: int, device: str) -> Workers:
        leader = {"STOKER_NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        self.workers = Workers(size, device, place=find_place(self.config, leader))
        self.member = self._start_member(str(self.workers.port))
        return self.workers

    def _start_member(self, port: str) -> subprocess.Popen[bytes]:
        listen = self.config.listen.model_copy(update={"port": 0})
        own = self.config.model_copy(
            update={"listen": listen, "termination_log": str(self.folder / "message"), "device": "cpu"}
        )
        (self.folder / "member.json").write_text(own.model_dump_json())
        place = {"STOKER_NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HOSTNAME": "giant-0-1"}
        return subprocess.Popen(
            [sys.executable, "-m", "stoker.engine", "--config", str(self.folder / "member.json")],
            env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
        )

    def close(self) -> None:
        self.engine.close()
        self.member.kill()
        self.member.wait()


@pytest.fixture(scope="module")
def folder(twins: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(twins["qwen3"], tmp_path_factory.mktemp("model"))


def test_stages_of_a_pipeline_lie_in_pods_of_their_own(folder: Path) -> None:
    """Two tensor ranks in each pod: the bits of one pod with the same tensor ranks. Before the replica of all others,
    because a process holds one engine of several ranks at a time."""
    one_pod = started(folder, 2)
    expected = answers(one_pod)
    closed(one_pod)
    pods = TwoPods(folder, tensor=2, pipeline=2)
    try:
        assert (pods.plan.ranks, pods.plan.pods) == (4, 2)
        assert answers(beside(pods.engine, stages=2)) == expected
        assert [pods.workers.watch.ranks[rank].pod for rank in (2, 3)] == ["giant-0-1"] * 2
    finally:
        pods.close()


def test_pods_keep_their_parts_of_blocks_on_disks_of_their_own(folder: Path, tmp_path: Path) -> None:
    """What cache and main memory have no room for comes back from both disks. The replica that follows begins with
    empty ones, although all parts are there. Before the replica of all other tests, as above."""
    whole = tier_config(folder, {}, num_blocks=1200)
    expected = tier_answers(build_engine(whole)[0])
    disk = {"path": str(tmp_path), "bytes": 10**8}
    tiers = tier_config(folder, {}, host_memory_bytes=1 << 15, disk=disk).model_dump(include={"cache", "scheduler"})
    for rounds in (2, 1):
        pods = TwoPods(folder, tiers, tensor=2)
        try:
            engine = opened(pods.engine)
            disks = engine.stats().disk
            assert disks is not None
            assert (disks.found, disks.blocks, disks.state) == (0, 0, "ok")
            assert list(tmp_path.rglob(f"*{SUFFIX}")) == []
            for _ in range(rounds):
                assert tier_answers(engine) == expected
                settle(engine)
            disks = engine.stats().disk
            assert disks is not None
            assert (disks.damaged, disks.foreign, disks.failed) == (0, 0, 0), disks
            assert disks.loaded > 0 or rounds == 1
            assert len(list(tmp_path.rglob(f"*{SUFFIX}"))) == 2 * disks.blocks > 0
            assert_sound(engine.audit())
        finally:
            pods.close()


@pytest.fixture(scope="module")
def two_pods(folder: Path) -> Iterator[TwoPods]:
    pods = TwoPods(folder, tensor=2)
    yield pods
    pods.close()


def test_two_pods_answer_as_one_rank_does(two_pods: TwoPods) -> None:
    """Greedy, seeded, forked, cached, structured: the tokens, and the log-probabilities to float32's rounding."""
    engine, _ = build_engine(config_of(two_pods.folder, 1, deterministic=True))
    expected, found = answers(engine), answers(beside(two_pods.engine))
    assert tokens_of(found) == tokens_of(expected)
    for key, entries in found.items():
        assert [score for _, score in entries] == pytest.approx([score for _, score in expected[key]], abs=1e-4), key
    assert (two_pods.plan.tensor, two_pods.plan.pods) == (2, 2)
    _, other = two_pods.engine.stats().ranks
    assert other.rank == 1
    assert other.pid not in (os.getpid(), two_pods.member.pid)
    assert two_pods.workers.watch.ranks[1].pod == "giant-0-1"


def test_a_rank_of_another_pod_that_hangs_ends_the_replica_by_name(two_pods: TwoPods) -> None:
    engine, pid = two_pods.engine, two_pods.workers.watch.ranks[1].pid
    engine.add_request("long", [3, 4], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
    engine.step()
    os.kill(pid, signal.SIGSTOP)
    two_pods.workers.watch.limits = RankLimits(silent_s=3)  # from now on: it would be too short for a busy machine
    with pytest.raises(ExecutorLost, match=r"^rank 1 in pod giant-0-1 is silent for \d+ s$"):
        finish(engine)
    os.kill(pid, signal.SIGCONT)
    assert two_pods.member.wait(LONG_S) == EXIT_CODES[Cause.PEER_LOST]
    message = json.loads((two_pods.folder / "message").read_text())
    assert message["cause"] == "PeerLost"
    assert message["detail"] == "rank 1 lost the leader of the replica, whose log has the reason"


def finish(engine: LLMEngine) -> None:
    while engine.has_unfinished:
        engine.step()
