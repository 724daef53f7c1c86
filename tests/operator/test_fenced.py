"""A replica that lost its Lease: it reads, and every write is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stoker.operator.cluster.fenced import FencedCluster, NotLeading
from stoker.operator.domain.plan import ControlCall, Ref
from testing.operator.cluster_contract import config_map, ref_of
from testing.operator.fakes import FakeClock
from tests.operator.test_key_ring import local_cluster

POD = Ref("Pod", "default", "pod", "uid")
WRITES: list[Callable[[FencedCluster, Ref], Awaitable[Any]]] = [
    lambda cluster, _: cluster.create(config_map("two")),
    lambda cluster, _: cluster.apply(config_map("one", a="2"), manager="us"),
    lambda cluster, one: cluster.patch(one, {"data": {"a": "2"}}),
    lambda cluster, one: cluster.update_status(one, {}),
    lambda cluster, one: cluster.scale(one, 2),
    lambda cluster, one: cluster.delete(one),
    lambda cluster, _: cluster.call(ControlCall(POD, "POST", "/drain", {})),
]


@pytest.mark.parametrize("write", WRITES)
def test_no_write_passes_without_the_lease(write: Callable[[FencedCluster, Ref], Awaitable[Any]]) -> None:
    async def story() -> None:
        inner = local_cluster(FakeClock())
        one = await inner.create(config_map("one", a="1"))
        with pytest.raises(NotLeading):
            await write(FencedCluster(inner, lambda: False), ref_of(one))
        assert (await inner.list("ConfigMap")).items == (one,)

    asyncio.run(story())


def test_reads_and_a_leaders_writes_pass() -> None:
    async def story() -> None:
        inner = local_cluster(FakeClock())
        before = (await inner.list("ConfigMap")).resource_version
        one = await FencedCluster(inner, lambda: True).create(config_map("one"))
        standby = FencedCluster(inner, lambda: False)
        assert (await standby.list("ConfigMap")).items == (one,)
        assert await standby.get("ConfigMap", "default", "one") == one
        event = await anext(standby.watch("ConfigMap", before))
        assert event.object == one

    asyncio.run(story())
