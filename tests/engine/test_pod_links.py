"""Links between pods of a replica, and a pod's place in it: what is refused, and what an end looks like."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from stoker.engine.config import EngineConfig
from stoker.engine.ranks.handshake import reach_leader, sealed_link
from stoker.engine.ranks.link import Link, LinkClosed
from stoker.engine.ranks.pod_links import PodLinks
from stoker.engine.ranks.pod_place import PodPlace, find_place
from stoker.engine.ranks.watch import LISTEN_S, RankLimits, RankWatch
from stoker.engine.ranks.wire import Join, pack
from stoker.pod.config_file import ConfigError

KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))
WAIT_S = 60
LEADER = {"STOKER_NODE_RANK": "0", "MASTER_ADDR": "chat-main-a-0.chat-main.default.svc"}


def link_pair(key: bytes = KEY, other: bytes = KEY) -> tuple[Link | Exception, Link | Exception]:
    """Both ends after their handshake, or why one has none."""
    ends = socket.socketpair()
    found: list[Link | Exception] = [RuntimeError(), RuntimeError()]

    def prove(side: int, key: bytes) -> None:
        try:
            found[side] = sealed_link(ends[side], key, serving=side == 0)
        except LinkClosed as error:
            found[side] = error
            ends[side].close()

    threads = [threading.Thread(target=prove, args=args) for args in ((0, key), (1, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0], found[1]


def test_ends_that_know_the_key_exchange_frames_in_order() -> None:
    leader, rank = link_pair()
    assert isinstance(leader, Link)
    assert isinstance(rank, Link)
    for frame in (b"", b"a step", os.urandom(100_000)):
        sender = threading.Thread(target=leader.send, args=(frame,))
        sender.start()
        assert rank.receive() == frame
        sender.join()
        rank.send(frame[:10])
        assert leader.receive() == frame[:10]
    rank.close()
    with closing(leader), pytest.raises(LinkClosed, match="has closed the link"):
        leader.receive()


def test_an_end_with_another_key_is_refused_by_both() -> None:
    for found in link_pair(KEY, OTHER_KEY):
        assert isinstance(found, LinkClosed)


@pytest.mark.parametrize("damage", ["changed", "repeated", "forged"])
def test_a_frame_that_was_not_sent_now_closes_the_link(damage: str) -> None:
    leader, rank = link_pair()
    assert isinstance(leader, Link)
    assert isinstance(rank, Link)
    ours, theirs = socket.socketpair()
    wire, leader.end = leader.end, ours
    leader.send(b"a step")
    frame = theirs.recv(1000)
    if damage == "changed":
        wire.sendall(frame[:-1] + b"q")
    elif damage == "repeated":
        wire.sendall(frame + frame)
        assert rank.receive() == b"a step"
    else:
        wire.sendall(b"\x01\0\0\0" + bytes(16) + b"x")
    with pytest.raises(LinkClosed, match="wrong code"):
        rank.receive()
    for end in (ours, theirs, wire, rank):
        end.close()


@pytest.fixture
def door() -> Iterator[PodLinks]:
    place = PodPlace(0, 3, 1, ("127.0.0.1", 0), "127.0.0.1", KEY, "leader")
    with closing(PodLinks(place)) as door:
        yield door


def joined(door: PodLinks, rank: int, key: bytes = KEY, release: str = version("stoker")) -> Link:
    link = reach_leader(("127.0.0.1", door.port), key, lambda: True)
    link.send(pack(Join(rank, 4711, f"pod-{rank}", release)))
    return link


def refused(link: Link) -> bool:
    """Whether the leader closes the link."""
    link.end.settimeout(WAIT_S)
    with closing(link), pytest.raises(LinkClosed, match=r"closed|reset"):
        link.receive()
    return True


def taken(door: PodLinks) -> Join:
    """The rank that has joined next."""
    join, link = door.joined.get(timeout=WAIT_S)
    link.close()
    return join


def test_the_leader_takes_each_rank_once_and_no_others(door: PodLinks) -> None:
    assert [*door.missing_pods] == [1, 2]
    first = joined(door, 1)
    assert taken(door) == Join(1, 4711, "pod-1", version("stoker"))
    assert [*door.missing_pods] == [2]
    assert refused(joined(door, 1))
    assert refused(joined(door, 0))
    assert refused(joined(door, 3))
    assert refused(joined(door, 2, release="0.0.0"))
    second = joined(door, 2)
    assert taken(door).rank == 2
    assert not door.missing_pods
    for link in (first, second):
        link.close()


def test_a_rank_waits_for_a_leader_until_its_pod_ends(door: PodLinks) -> None:
    port = door.port
    door.close()
    tries = iter((True, True, False))
    with pytest.raises(LinkClosed, match="this pod ends"):
        reach_leader(("127.0.0.1", port), KEY, lambda: next(tries))


def test_a_rank_of_another_pod_is_not_silent_before_it_has_joined_and_is_named_with_its_pod() -> None:
    watch = RankWatch(2, RankLimits(silent_loading_s=5, settle_s=0))
    watch.ranks[1].joined = False
    now_s = 0.0
    for _ in range(100):
        now_s += LISTEN_S
        watch.listen(now_s)
    assert watch.verdict(now_s) is None
    watch.ranks[1].joined, watch.ranks[1].pod = True, "chat-main-a-0-1"
    for _ in range(30):
        now_s += LISTEN_S
        watch.listen(now_s)
    assert watch.verdict(now_s) == "rank 1 in pod chat-main-a-0-1 is silent for 8 s"
    watch.ranks[1].closed = True
    assert watch.verdict(now_s) == "rank 1 in pod chat-main-a-0-1 has ended: its connection is closed"
    watch.failed(1, "OSError: no such file", now_s)
    watch.heard(1)
    assert watch.verdict(now_s) == "rank 1 in pod chat-main-a-0-1: OSError: no such file"


def config(tmp_path: Path, pods: int = 2, tensor: int = 4, **parallelism: Any) -> EngineConfig:
    (tmp_path / "key").write_text(KEY.hex())
    return EngineConfig.model_validate(
        {
            "model": {"path": "/m"},
            "parallelism": {"tensor": tensor, **parallelism},
            "replica": {"pods": pods, "key_file": str(tmp_path / "key")},
        }
    )


def test_a_pod_knows_its_ranks_and_those_of_others(tmp_path: Path) -> None:
    place = find_place(config(tmp_path), {**LEADER, "STOKER_NODE_RANK": "1", "MASTER_PORT": "29501", "HOSTNAME": "one"})
    assert place is not None
    assert (place.ranks, place.others, place.leader[1]) == (range(2, 4), range(2, 4), 29501)
    assert (place.key, place.name) == (KEY, "one")
    stages = find_place(config(tmp_path, pipeline=3), {**LEADER, "STOKER_NODE_RANK": "1"})
    assert stages is not None
    assert (stages.ranks, stages.others) == (range(6, 12), range(6, 12))
    assert find_place(config(tmp_path, pods=1), {}) is None


@pytest.mark.parametrize(
    ("changes", "variables", "text"),
    [
        ({"pods": 3}, {}, "replica.pods 3 does not divide parallelism.tensor 4 x parallelism.pipeline 1 = 4 ranks"),
        ({}, {"STOKER_NODE_RANK": ""}, "STOKER_NODE_RANK must be a whole number, got ''"),
        ({}, {"STOKER_NODE_RANK": "2"}, "STOKER_NODE_RANK is 2, replica.pods 2 allows 0 to 1"),
        ({}, {"MASTER_ADDR": ""}, "MASTER_ADDR is missing; replica.pods 2 needs the address of pod 0"),
        ({}, {"MASTER_PORT": "x"}, "MASTER_PORT must be a whole number, got 'x'"),
    ],
)
def test_a_wrong_place_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], variables: dict[str, str], text: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        find_place(config(tmp_path, **changes), {**LEADER, **variables})
    assert str(refusal.value) == text


def test_a_key_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    wrong = config(tmp_path)
    (tmp_path / "key").write_text("abc")
    with pytest.raises(ConfigError, match=r"^replica\.key_file .*key: "):
        find_place(wrong, LEADER)
    without = wrong.model_copy(update={"replica": wrong.replica.model_copy(update={"key_file": None})})
    with pytest.raises(ConfigError, match=r"replica\.key_file is needed with replica\.pods 2"):
        find_place(without, LEADER)
