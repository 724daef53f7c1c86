"""Data ranks as partners, real processes that share experts: two cores in one pod compute prompts, two pods answer.

Each rank has a port, an epoch and a landing zone of its own; all of one engine compute the same steps and end together.
A policy splits every request, so that no test depends on measured rates.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import torch
import transformers

from stoker.pod.data_rank import RANK_HEADER
from stoker.pod.split_requests import PREFILL_HEADER
from testing.engine.transfers import wait_for
from testing.free_port import free_port
from testing.router.always_split import AlwaysSplit
from testing.router.engine_process import Engine
from testing.router.harness import routed, run, until
from tests.engine.conftest import SHAPE
from tests.engine.test_server_real import write_model
from tests.router.test_split_engines import (
    LONG,
    TEXT,
    Requests,
    assert_equal,
    paired,
    read_all,
    requests_of,
    whole_answers,
)

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SHARED: dict[str, Any] = {"parallelism": {"data": 2, "expert": 2}, "device": "cpu"}
START_S = 300.0


def start(
    folder: Path, name: str, role: str, environment: Mapping[str, str] = MappingProxyType({}), **settings: Any
) -> Engine:
    transfer = {"listen": "127.0.0.1:0", "key_file": str(folder / "key"), "zone_blocks": 32}
    return Engine(folder, name, environment, role=role, transfer=transfer, **settings)


def start_pods(folder: Path) -> dict[str, Engine]:
    """The two pods of a replica with a data rank each: `d0` and `d1`."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = SHARED | {"replica": {"pods": 2, "key_file": str(folder / "key")}}
    return {
        f"d{number}": start(folder, f"d{number}", "decode", place | {"STOKER_NODE_RANK": str(number)}, **settings)
        for number in range(2)
    }


def write_experts(folder: Path) -> None:
    """Write a tiny model with experts, with a tokenizer of its own."""
    write_model(folder)
    torch.manual_seed(4)
    shape: dict[str, Any] = {**SHAPE, **EXPERTS}
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape)).save_pretrained(folder)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """`p`: two copies in one pod; `d0`, `d1`: one in each of two; `e`: one that holds all experts."""
    folder = tmp_path_factory.mktemp("data")
    write_experts(folder / "tiny")
    (folder / "key").write_text(secrets.token_hex(32))
    made = {"e": start(folder, "e", "decode"), "p": start(folder, "p", "prefill", **SHARED), **start_pods(folder)}
    try:
        for engine in made.values():
            engine.wait_until_ready()
            wait_for(lambda engine=engine: engine.status()["peer"] is not None, "a report", START_S)  # type: ignore[misc]
        yield made
    finally:
        for engine in made.values():
            engine.kill()


def endpoints(engine: Engine) -> list[str]:
    """Where other engines reach its data ranks."""
    peer = engine.status()["peer"]
    return [copy["endpoint"] for copy in peer.get("copies", [peer])]


def test_each_rank_sends_and_receives_and_the_tokens_are_those_of_one_rank(engines: dict[str, Engine]) -> None:
    epochs = {copy["epoch"] for copy in engines["p"].status()["peer"]["copies"]}
    assert len(epochs) == len(set(endpoints(engines["p"]))) == 2
    for answering in ("d0", "d1"):
        for endpoint in endpoints(engines["p"]):
            split_once(engines, answering, endpoint)
    for endpoint in (*endpoints(engines["d0"]), *endpoints(engines["d1"])):
        split_once(engines, "p", endpoint)
    for name, slots in (("p", 64), ("d0", 32), ("d1", 32)):
        wait_for(lambda: engines[name].status()["transfer"]["free_slots"] == slots, "free slots", START_S)  # noqa: B023 - called here
    assert not any(engines[name].status()["transfer"]["fallbacks"].get("damaged") for name in ("p", "d0", "d1"))


def test_a_named_rank_finds_its_own_beginnings_and_takes_blocks_of_its_neighbour(engines: dict[str, Engine]) -> None:
    body = {"prompt": f"named {LONG}", "max_tokens": 2}

    def cached(rank: int) -> int:
        headers = {RANK_HEADER.decode(): str(rank)}
        answer = httpx.post(f"{engines['p'].url}{TEXT}", json=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(rank) > 0 for rank in (1, 0, 1, 0)] == [False, False, True, True]
    split_once(engines, "p", endpoints(engines["p"])[1], rank=0)


def split_once(engines: dict[str, Engine], answering: str, endpoint: str, rank: int | None = None) -> None:
    """Ask for new prompts until one of them is split: on a busy machine the helper may not answer in time at first."""
    before, tries = outcomes(engines[answering]), iter(range(1000))

    def is_split() -> bool:
        prompt = f"{answering} {endpoint} {next(tries)} {LONG}"
        body = {"prompt": prompt, "seed": 5, "temperature": 0.9, "max_tokens": 16, "ignore_eos": True, "logprobs": 1}
        assert answer_of(engines[answering], body, endpoint, rank) == answer_of(engines["e"], body)
        found = outcomes(engines[answering])
        return any(found[kind] > before[kind] for kind in ("split", "prefill_only"))

    wait_for(is_split, "a split request", START_S)


def outcomes(engine: Engine) -> dict[str, int]:
    return dict(engine.status()["transfer"]["outcomes"])


def answer_of(engine: Engine, body: dict[str, Any], prefill: str = "", rank: int | None = None) -> tuple[Any, ...]:
    headers = {PREFILL_HEADER.decode(): prefill} if prefill else {}
    if rank is not None:
        headers[RANK_HEADER.decode()] = str(rank)
    answer = httpx.post(f"{engine.url}{TEXT}", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["text"], choice["finish_reason"], choice["logprobs"]["tokens"]


def test_no_request_is_lost_when_a_rank_dies_that_receives_and_then_one_that_sends(engines: dict[str, Engine]) -> None:
    """A rank that is lost ends all of its replica: `e` goes on with what both pods answered, and then without `p`."""

    async def scenario() -> None:
        for victim, rank, names in (("d1", 0, ("p", "d0", "d1", "e")), ("p", 1, ("p", "e"))):
            requests: Requests = requests_of(victim)
            expected = await whole_answers(engines["e"], requests)
            pid = engines[victim].status()["ranks"][rank]["pid"]
            async with routed(*(engines[name] for name in names), policy_object=AlwaysSplit()) as (router, http):
                await paired(router)
                streams = read_all(http, requests)
                await until(lambda: any('"choices"' in client.text for client, _ in streams))  # noqa: B023 - awaited here
                os.kill(pid, signal.SIGKILL)
                for _, task in streams:
                    await task
            assert_equal([client.text for client, _ in streams], expected)
            for name in names:
                if name[0] == victim[0]:
                    wait_for(lambda: engines[name].process.poll() is not None, "the end of the replica", START_S)  # noqa: B023

    run(scenario, limit_s=600)
