"""Several cores behind one front: balanced, summed, and ended together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.engine.config import EngineConfig
from stoker.engine.core.core_client import CoreClient
from stoker.engine.core.core_group import TIER_SUMS, CoreGroup, merged_facts, merged_stats
from stoker.engine.core.core_processes import visible_gpus
from stoker.engine.core.messages import AddRequest, pack, unpack
from stoker.engine.core.stats import HostTierStats, PeerCopy, Stats
from stoker.engine.core_start import core_starts
from stoker.engine.execution.executor import RankState
from stoker.engine.llm import LLM
from stoker.engine.plan_checks import refuse_transfer
from stoker.engine.sampling import SamplingParams
from stoker.pod.causes import Cause
from stoker.pod.config_file import ConfigError, load
from stoker.pod.data_rank import RANK_HEADER
from testing.engine.fake_core import release
from testing.engine.serving import run, until
from testing.engine.stats import STATS, TRANSFER
from tests.engine.test_server_program import COMPLETIONS, Program, program

TWO: dict[str, Any] = {"parallelism": {"data": 2}}


def pids(p: Program) -> list[int]:
    """The core processes of a program, by the sockets that they bind."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(word == link.address for word in words for link in p.engine.links):
            found.append(int(folder.name))
    return found


def test_requests_go_to_the_core_with_least_to_do_and_its_numbers_add_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, **TWO) as p:
            await until(lambda: p.engine.front.ready)
            bodies = [{"prompt": f"held say:{number}" + "x" * 30, "max_tokens": 40} for number in range(6)]
            running = [asyncio.ensure_future(p.http.post(COMPLETIONS, json=body)) for body in bodies]
            await until(lambda: [link.running for link in p.engine.links] == [3, 3])
            life = (await p.http.get("/v1/requests/none")).status_code
            assert life == 404
            release(tmp_path)
            answers = [(await answer).json()["choices"][0]["text"] for answer in running]
            assert answers == [f"{number}" + "x" * 30 for number in range(6)]
            assert [link.running for link in p.engine.links] == [0, 0]
            await until(lambda: p.engine.core.stats is not None)
            status = (await p.http.get("/status")).json()
            assert (status["phase"], status["total_blocks"], status["waiting"]) == ("Serving", 128, 4)
            metrics = (await p.http.get("/metrics")).text
            assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 100.0' in metrics

    run(scenario)


def test_a_request_goes_to_the_rank_that_its_header_names(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, **TWO) as p:
            await until(lambda: p.engine.front.ready)

            async def asked(rank: str, **body: Any) -> asyncio.Future[httpx.Response]:
                """Send a request that hangs."""
                before, headers = p.engine.core.running, {RANK_HEADER.decode(): rank}
                sent = {"prompt": "hang say:x", "max_tokens": 10, **body}
                found = asyncio.ensure_future(p.http.post(COMPLETIONS, json=sent, headers=headers))
                await until(lambda: found.done() or p.engine.core.running > before)
                return found

            running = [await asked("1") for _ in range(2)]
            running.append(await asked("1", use_beam_search=True, n=2))
            assert [link.running for link in p.engine.links] == [0, 3]
            ranks = p.engine.front.reports.report()["ranks"]
            assert [(one["requests"], one["waiting"], len(one["prompts"])) for one in ranks] == [(0, 0, 0), (3, 3, 3)]
            running.append(await asked("1", prompt=["hang say:y"] * 4))
            await until(lambda: p.engine.core.running == 7)
            assert min(link.running for link in p.engine.links) > 2, "several prompts are dealt out"
            for wrong in ("2", "-1", "1.0", "one", "00001"):
                refused = (await (await asked(wrong))).json()["error"]
                assert refused["message"].endswith(f"a rank's number from 0 to 1 is allowed, got {wrong!r}")
            p.engine.hurry = True
            for one in running:
                one.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    run(scenario)


def test_a_long_request_weighs_more_than_a_short_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, **TWO) as p:
            await until(lambda: p.engine.front.ready)
            asked: list[asyncio.Future[httpx.Response]] = []
            for prompt, max_tokens in (("hang say:long", 150), ("hang say:a", 10), ("hang say:b", 10)):
                body = {"prompt": prompt, "max_tokens": max_tokens}
                asked.append(asyncio.ensure_future(p.http.post(COMPLETIONS, json=body)))
                await until(lambda: p.engine.core.running == len(asked))
            assert sorted(link.running for link in p.engine.links) == [1, 2]
            p.engine.hurry = True
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    run(scenario)


def test_a_killed_core_ends_the_others_and_the_program(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, **TWO) as p:
            await until(lambda: p.engine.front.ready)
            found = pids(p)
            assert len(found) == 2
            os.kill(found[0], signal.SIGKILL)
            assert (await p.ended).cause is Cause.RANK_KILLED
            await until(lambda: pids(p) == [])

    run(scenario)


def test_all_cores_drain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, **TWO, grace_period_s=240) as p:
            await until(lambda: p.engine.front.ready)
            body = {"prompt": "held say:" + "x" * 40, "max_tokens": 50}
            running = [asyncio.ensure_future(p.http.post(COMPLETIONS, json=body)) for _ in range(2)]
            await until(lambda: [link.running for link in p.engine.links] == [1, 1])
            p.engine.stop.set()
            await until(lambda: p.engine.front.served.draining)
            release(tmp_path)
            assert [(await one).json()["choices"][0]["text"] for one in running] == ["x" * 40] * 2
            assert (await p.ended).cause is Cause.INTERRUPTED

    run(scenario)


def test_each_core_has_a_time_line_of_its_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with program(tmp_path, **TWO, timeline=str(tmp_path / "line")):
            written = [json.loads((tmp_path / f"config{number}.json").read_text()) for number in range(2)]
            assert [config["timeline"] for config in written] == [f"{tmp_path}/line.{number}" for number in range(2)]

    run(scenario)


def test_stats_add_up_field_by_field() -> None:
    ranked = replace(STATS, time_s=5.0, progressed_s=1.0, ranks=(RankState(0, 7, 2, 0.0), RankState(1, 8, 2, 0.1)))
    other = replace(STATS, time_s=4.0, progressed_s=3.0, ranks=(RankState(0, 9, 1, 0.0), RankState(1, 10, 1, 0.2)))
    merged = merged_stats([ranked, other])
    assert (merged.time_s, merged.progressed_s) == (5.0, 3.0)
    assert [(state.rank, state.pid) for state in merged.ranks] == [(0, 7), (1, 8), (2, 9), (3, 10)]
    for field in fields(Stats):
        one: Any = getattr(STATS, field.name)
        both = getattr(merged, field.name)
        if field.name in ("time_s", "progressed_s", "ranks"):
            continue
        if one is None:
            assert both is None
        elif isinstance(one, dict):
            assert both == dict(Counter(one) + Counter(one)) | {key: 0 for key, value in one.items() if not value}
        elif isinstance(one, tuple):
            assert both == tuple(2 * value for value in one)
        else:
            assert both == 2 * one, field.name


def test_each_core_has_ports_of_its_own_for_other_engines(tmp_path: Path) -> None:
    transfer = {"listen": "0.0.0.0:8101", "key_file": "k"}
    shape = {"data": 3, "tensor": 2}
    config = EngineConfig.model_validate({"model": {"path": "m"}, "transfer": transfer, "parallelism": shape})
    core_starts(config, tmp_path)
    written = [load(EngineConfig, tmp_path / f"config{number}.json") for number in range(3)]
    assert [one.transfer.listen for one in written] == ["0.0.0.0:8101", "0.0.0.0:8106", "0.0.0.0:8111"]
    assert [one.transfer.copy_number for one in written] == [0, 1, 2]
    for one in written:
        refuse_transfer(one, "cpu")


def test_cores_are_told_apart_as_peers_and_what_they_exchange_adds_up() -> None:
    slow = replace(
        TRANSFER, endpoint="0.0.0.0:8104", epoch="pod-1.1/9", unmet="no NVLink", avoided={"10.0.0.8:8101": "damaged"},
        handover_s=0.03, prefill_tokens_per_s=None, helping_tokens=7, bytes={"tcp": 4096}, seconds={"tcp": 1.5},
        load={**TRANSFER.load, "arrived": 3, "uncached": {"70": 2}},
    )  # fmt: skip
    own = replace(TRANSFER, load={**TRANSFER.load, "arrived": 4, "uncached": {"70": 1, "80": 5}})
    merged = merged_stats([replace(STATS, transfer=own), replace(STATS, waiting=4, transfer=slow)]).transfer
    assert merged == replace(
        TRANSFER, unmet="no NVLink", avoided={**TRANSFER.avoided, **slow.avoided}, handover_s=0.02, zone_slots=16,
        free_slots=12, receiving=2, helping=4, helping_waiting=2, helping_tokens=307, outcomes={"split": 6, "local": 2},
        fallbacks={"lost": 2, "late": 0}, helps={"handed": 8}, blocks={"sent": 18}, refused={"stale": 4},
        bytes={"tcp": 8192, "shared-memory": 0}, seconds={"tcp": 2.0}, rates={"tcp": 4096.0},
        copies=(PeerCopy("0.0.0.0:8101", "pod-1/7", 1, 300), PeerCopy("0.0.0.0:8104", "pod-1.1/9", 5, 7)),
        load={**TRANSFER.load, "arrived": 7, "uncached": {"70": 3, "80": 5}},
    )  # fmt: skip
    assert unpack(pack(replace(STATS, transfer=merged))) == replace(STATS, transfer=merged)


def test_a_request_goes_to_the_core_that_computes_no_prompts_for_other_engines() -> None:
    cores = [CoreClient(f"ipc://{number}") for number in range(2)]
    group = CoreGroup(cores)  # nothing is connected
    cores[0].stats = replace(STATS, transfer=TRANSFER)
    cores[1].stats = replace(STATS, transfer=replace(TRANSFER, helping_tokens=200))
    request = AddRequest("r", (1,) * 50, SamplingParams(max_tokens=40), 0.0)
    with group.request(request), group.request(replace(request, request_id="s")):
        assert [core.running for core in cores] == [0, 2]
        with group.request(replace(request, request_id="t")):
            assert [core.running for core in cores] == [1, 2]
    asyncio.run(group.close())


def test_host_tiers_add_up_where_cores_have_one() -> None:
    counts: dict[str, Any] = dict.fromkeys(TIER_SUMS, 3)
    tier = HostTierStats(**counts, block_bytes=8, write_bytes_per_s=1.0, read_bytes_per_s=2.0, transport="memory")
    with_tier = replace(STATS, host=tier)
    doubled: dict[str, Any] = dict.fromkeys(TIER_SUMS, 6)
    assert merged_stats([with_tier, with_tier]).host == replace(tier, **doubled)
    assert merged_stats([STATS, with_tier]).host == tier


def test_facts_are_known_when_every_core_knows_them() -> None:
    assert merged_facts([None, None]) is None


@pytest.mark.parametrize(
    ("listed", "core", "seen"),
    [(None, 0, "0,1"), (None, 1, "2,3"), ("4,5,6,7", 1, "6,7"), ("GPU-a,GPU-b", 0, "GPU-a,GPU-b")],
)
def test_each_core_sees_its_own_gpus(listed: str | None, core: int, seen: str) -> None:
    environment = {"A": "1"} | ({} if listed is None else {"CUDA_VISIBLE_DEVICES": listed})
    assert visible_gpus(environment, core, 2) == {"A": "1", "CUDA_VISIBLE_DEVICES": seen}


def test_too_few_gpus_are_refused_by_their_number() -> None:
    with pytest.raises(ValueError, match="4 GPUs are needed, CUDA_VISIBLE_DEVICES lists 3"):
        visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 1, 2)


def test_an_engine_in_a_script_has_one_core() -> None:
    config = EngineConfig.model_validate({"model": {"path": "m"}, "parallelism": {"data": 2}})
    with pytest.raises(ConfigError, match=r"parallelism\.data must be 1 for an engine in this process, got 2"):
        LLM(config)
