"""Two engine processes that share a store: the router learns what is in it, and the other engine loads it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from stoker.router.app import Router
from stoker.router.cache_aware import CacheAware
from stoker.router.work import work_of
from testing.router.engine_process import Engine
from testing.router.harness import routed, run
from tests.engine.test_server_real import write_model

BUSY = 1000
"""Requests that an engine seems to have, so that the other one is asked."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = tmp_path_factory.mktemp("stored")
    write_model(folder / "tiny")
    (folder / "blocks").mkdir()
    store = {"paths": [str(folder / "blocks")], "bytes": 10**9}
    cache = {"num_blocks": 200, "block_size": 4, "host_memory_bytes": 1 << 22, "preemption": "swap", "store": store}
    made = [Engine(folder, name, cache=cache) for name in "ab"]
    try:
        for engine in made:
            engine.wait_until_ready()
        yield made
    finally:
        for engine in made:
            engine.kill()


def body_of(number: int) -> dict[str, Any]:
    """A request whose beginning has whole pieces, although its prompt is short: what follows a prompt counts too."""
    prompt = f"{number} the lazy brown fox jumps over the quick dog"
    return {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "metadata": {"x": "y" * 2500}}


async def store_of(engine: Engine, field: str) -> int:
    """A count of the engine's store."""
    async with httpx.AsyncClient(timeout=120) as http:
        return int((await http.get(f"{engine.url}/status")).json()["store"][field])


async def ask(router: Router, http: httpx.AsyncClient, name: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the named engine answers, because the other one seems to be busy."""
    others = [backend for backend in router.backends.all if backend.entry.pod_uid != name]
    for backend in others:
        backend.pending += BUSY
    answer = await http.post("/v1/completions", json=body)
    for backend in others:
        backend.pending -= BUSY
    assert (answer.status_code, answer.headers["x-stoker-pod-uid"]) == (200, name)
    content: dict[str, Any] = answer.json()
    return content


def test_what_one_engine_stored_counts_for_the_other_which_loads_it(engines: list[Engine]) -> None:
    policy, (a, b) = CacheAware(), engines

    async def is_stored(chain: tuple[int, ...]) -> bool:
        """Whether the router knows the whole beginning to be stored, and both engines list the same blocks."""
        if list(policy.stored.depths(chain).values()) != [len(chain)]:
            return False
        return await store_of(a, "blocks") == await store_of(b, "blocks") > 0

    async def scenario() -> None:
        async with routed(*engines, policy_object=policy, max_resume_bytes=0) as (router, http):
            while not share_a_store(router):
                await asyncio.sleep(0.01)
            for number in itertools.count(1):
                body = body_of(number)
                work = work_of(httpx.Request("POST", "http://x", json=body).content, ())
                assert len(work.chain) >= 2
                first = await ask(router, http, "a", body)
                while not await is_stored(work.chain):
                    await asyncio.sleep(0.05)
                second = await ask(router, http, "b", body)
                assert second["choices"][0]["text"] == first["choices"][0]["text"]
                if second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0:
                    break  # a busy machine's engine does not wait for late loads
            assert await store_of(b, "loaded") > 0

    run(scenario, limit_s=600)


def share_a_store(router: Router) -> bool:
    """Whether both engines report the same store."""
    stores = [backend.load.store for backend in router.backends.all if backend.load is not None]
    return len(stores) == 2 and None not in stores and len({store.name for store in stores if store is not None}) == 1
