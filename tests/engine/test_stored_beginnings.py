"""Beginnings in the store: what engines announce to routers, against the store's files and a slow twin."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.engine.config import EngineConfig, StoreConfig
from stoker.engine.core.block_identity import BlockIdentity
from stoker.engine.core.blocks import BlockContent, BlockManager
from stoker.engine.core.build import build_engine
from stoker.engine.core.core_group import merged_stats
from stoker.engine.core.disk.open_tiers import store_name
from stoker.engine.core.disk.store_tier import StoreTier
from stoker.engine.core.engine import LLMEngine
from stoker.engine.core.front_requests import FrontRequests
from stoker.engine.core.messages import AddRequest, CoreMessage, pack, unpack
from stoker.engine.core.stats import SharedStoreStats
from stoker.engine.core.stored_beginnings import MOST_WATCHED, StoredBeginnings
from stoker.engine.core.tier_costs import TierCosts
from stoker.engine.sampling import SamplingParams
from stoker.pod.beginnings import BEGINNING_HEADER, MOST_ANNOUNCED
from stoker.pod.config_file import parse
from stoker.router.load import Load
from testing.engine.cold_blocks import IDENTITY
from testing.engine.serving import run, serving, until
from testing.engine.stats import STATS

HEADER = BEGINNING_HEADER.decode()
BLOCK = 4
WAIT_S = 120.0
STORE = SharedStoreStats("ab", 16, 4096, 0.002, True, {"7": True, "8": False})


class Listed:
    """A store whose listing a test sets."""

    def __init__(self) -> None:
        self.readable = True
        self.digests: set[bytes] = set()

    def lists(self, content: BlockContent) -> bool:
        return content.digest in self.digests


def beginnings(listed: Listed, costs: TierCosts | None = None) -> StoredBeginnings:
    return StoredBeginnings("s", BlockManager(8, BLOCK, True, b"root"), listed, costs or TierCosts(), 4096)


def prompt(number: int) -> list[int]:
    return [number, 0, 0, 1, 2, 3, number % 5, 4, 9]


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from(["watch", "write", "remove", "look", "down", "up"]), st.integers(0, 9)), max_size=60
    )
)
def test_who_reads_every_report_knows_what_is_stored(events: list[tuple[str, int]]) -> None:
    """The slow twin: all that was watched, looked up one by one."""
    listed = Listed()
    own, watched, told = beginnings(listed), set[int](), dict[str, bool]()
    last = {number: own.blocks.digests_of(prompt(number))[-1].digest for number in range(10)}
    for kind, number in [*events, ("up", 0), ("look", 0)]:
        if kind == "watch":
            own.watch(f"{number:x}", prompt(number))
            watched.add(number)
        elif kind == "write":
            listed.digests.add(last[number])
        elif kind == "remove":
            listed.digests.discard(last[number])
        elif kind == "look":
            stats = own.stats()
            assert stats.readable == listed.readable
            told.update(stats.announced)
            if listed.readable:
                stored = {name for name, is_there in told.items() if is_there}
                assert stored == {f"{one:x}" for one in watched if last[one] in listed.digests}
        else:
            listed.readable = kind == "up"


def test_a_beginning_is_stored_with_its_salt() -> None:
    listed = Listed()
    own = beginnings(listed)
    own.watch("1", prompt(1), b"a")
    own.watch("2", prompt(1), b"b")
    listed.digests = {own.blocks.digests_of(prompt(1), b"a")[-1].digest}
    assert own.stats().announced == {"1": True}


def test_names_are_bounded_and_only_the_newest_changes_are_told() -> None:
    listed = Listed()
    own = beginnings(listed)
    for number in range(MOST_WATCHED + 100):
        own.watch(f"{number:x}", prompt(number))
    listed.digests = {own.blocks.digests_of(prompt(number))[-1].digest for number in range(MOST_WATCHED + 100)}
    announced = own.stats().announced
    assert len(announced) == MOST_ANNOUNCED
    assert set(announced.values()) == {True}
    assert len(own._watched) == len(own._announced) == MOST_WATCHED
    own.watch("", prompt(1))
    own.watch("short", [1, 2, 3])
    assert len(own._watched) == MOST_WATCHED


def test_the_price_of_a_block_is_what_was_measured() -> None:
    costs = TierCosts()
    own = beginnings(Listed(), costs)
    assert own.stats().block_s is None
    costs.fetched.record(4096, 0.5)
    assert own.stats().block_s == pytest.approx(0.5)
    costs.reads.record(4096, 0.25)
    assert own.stats().block_s == pytest.approx(0.75)


def test_the_name_of_a_store_tells_blocks_that_cannot_be_shared_apart() -> None:
    one, other = StoreConfig(paths=("/a", "/b"), bytes=1), StoreConfig(paths=("/b", "/a"), bytes=5)
    salted = BlockIdentity(IDENTITY.fingerprint, "other tenant", IDENTITY.layout)
    assert store_name(one, IDENTITY) == store_name(other, IDENTITY)
    names = {
        store_name(one, IDENTITY),
        store_name(one, salted),
        store_name(StoreConfig(paths=("/a",), bytes=1), IDENTITY),
    }
    assert len(names) == 3


def settle(engine: LLMEngine) -> None:
    """Let the engine write all that it can, and list the store anew."""
    assert engine.tier is not None
    assert engine.tier.cold is not None
    until_s = time.monotonic() + WAIT_S
    store = engine.tier.cold.find("store")
    assert isinstance(store, StoreTier)
    looks = {name: volume.num_tended + 2 for name, volume in store.volumes.items()}
    quiet = 0
    while quiet < 3 or any(volume.num_tended < looks[name] for name, volume in store.volumes.items()):
        assert time.monotonic() < until_s
        for volume in store.volumes.values():
            volume.tend_now()
        engine.rest()
        tended = all(volume.num_tended >= looks[name] for name, volume in store.volumes.items())
        quiet = quiet + 1 if tended and engine.tier.cold.settled and not engine.tier.busy else 0
        time.sleep(0.001)


def refuse_nothing(front: str, message: CoreMessage) -> None:
    raise AssertionError(f"{front} was sent {message}")


def test_engines_announce_what_any_of_them_wrote_and_what_was_removed(twins: dict[str, Any], tmp_path: Path) -> None:
    folder, volume = tmp_path / "model", tmp_path / "blocks"
    twins["llama"].save_pretrained(folder)
    volume.mkdir()
    store = {"paths": [str(volume)], "bytes": 10**9}
    cache = {"num_blocks": 30, "block_size": BLOCK, "host_memory_bytes": 1 << 20, "store": store}
    config = parse(
        EngineConfig,
        {"model": {"path": str(folder), "dtype": "float32"}, "device": "cpu", "cache": cache, "threads": 1},
    )
    engines = [build_engine(config)[0] for _ in range(2)]
    named = list(range(5, 30))
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=1)
    for engine in engines:
        requests = FrontRequests(engine, refuse_nothing, lambda: None, time.monotonic)
        requests.add("front", AddRequest("r", tuple(named), params, 0.0, beginning="5"))
        assert announced(engine) == {}
    assert len({engine.beginnings.name for engine in engines if engine.beginnings is not None}) == 1
    first, second = engines
    second.abort_request("r", front="front")
    while first.has_unfinished:
        first.step()
    for engine in engines:
        settle(engine)
        assert announced(engine) == {"5": True}
    for folder_of_blocks in list(volume.iterdir()):
        shutil.rmtree(folder_of_blocks)
    settle(second)
    assert announced(second) == {"5": False}
    for engine in engines:
        engine.close()


def announced(engine: LLMEngine) -> dict[str, bool]:
    stats = engine.stats().shared_store
    assert stats is not None
    return dict(stats.announced)


def test_the_front_passes_the_name_on_and_reports_the_store(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as s:
            headers = {HEADER: "00ff"}
            assert "store" not in s.front.reports.report()
            for text in ("say:a", ["say:a", "say:b"]):
                answer = await s.http.post("/v1/completions", json={"prompt": text}, headers=headers)
                assert answer.status_code == 200
            assert [one.beginning for one in s.core.requests] == ["00ff", "", ""]
            wrong = await s.http.post("/v1/completions", json={"prompt": "say:a"}, headers={HEADER: "no"})
            assert wrong.status_code == 400
            assert f"header {HEADER}: 1 to 16 hexadecimal digits are allowed, got 'no'" in wrong.text
            await s.core.send(replace(STATS, step_tokens=(0,) * 14, shared_store=STORE))
            await until(lambda: s.front.served.shared_store == STORE)
            load = Load.model_validate({"seq": 1, **s.front.reports.report()})
            assert load.store is not None
            assert (load.store.name, load.store.block_s, load.store.announced) == ("ab", 0.002, {"7": True, "8": False})
            assert load.store.load_s(17) == 0.004

    run(scenario)


def test_reports_of_several_cores_are_one() -> None:
    other = replace(STORE, announced={"8": True, "9": True})
    merged = merged_stats([replace(STATS, shared_store=STORE), replace(STATS, shared_store=other)])
    assert merged.shared_store == replace(STORE, announced={"7": True, "8": True, "9": True})
    assert unpack(pack(merged)) == merged
