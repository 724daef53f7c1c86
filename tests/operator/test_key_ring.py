"""The control key: made once, distributed to pods before its first use, rotated without a failed request."""

from __future__ import annotations

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.cluster.interface import Cluster
from stoker.operator.cluster.local.addresses import Addresses
from stoker.operator.cluster.local.local_cluster import LocalCluster
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.pod_http import PodHttp
from stoker.operator.service.key_ring import BadKeys, KeyRing, KeySecret, read_folder, rotated
from stoker.pod.control_key import ControlVerifier, new_private_key, sign
from testing.operator.fakes import FakeClock


def local_cluster(clock: FakeClock) -> LocalCluster:
    numbers = itertools.count(1)
    objects = ObjectStore(now=lambda: datetime(2026, 1, 1, tzinfo=UTC), new_uid=lambda: f"uid-{next(numbers)}")
    return LocalCluster(objects, Addresses("loopback", lambda _: True), PodHttp(b"", clock, lambda: "t"), clock)


def secret(cluster: Cluster, clock: FakeClock, **given: Any) -> KeySecret:
    return KeySecret(cluster, clock, "stoker", "control", **given)


def test_the_first_reader_makes_the_secret_and_all_read_the_same() -> None:
    async def story() -> None:
        clock = FakeClock()
        cluster = local_cluster(clock)
        one, two = await secret(cluster, clock).read(), await secret(cluster, clock).read()
        assert one == two
        assert one.next is not None
        assert one.current != one.next
        assert sorted(one.public_keys()) == ["current.pem", "next.pem"]

    asyncio.run(story())


def test_the_next_key_is_the_current_one_after_its_time() -> None:
    async def story() -> None:
        clock = FakeClock()
        cluster = local_cluster(clock)
        first = await secret(cluster, clock, rotate_days=90).read()
        await clock.advance(timedelta(days=89).total_seconds())
        assert await secret(cluster, clock, rotate_days=90).read() == first
        await clock.advance(timedelta(days=1).total_seconds())
        second = await secret(cluster, clock, rotate_days=90).read()
        assert second.current == first.next
        assert second.next not in (first.current, first.next)
        assert await secret(cluster, clock, rotate_days=90).read() == second

    asyncio.run(story())


def test_zero_days_leave_the_rotation_to_people() -> None:
    async def story() -> None:
        clock = FakeClock()
        cluster = local_cluster(clock)
        first = await secret(cluster, clock, rotate_days=0).read()
        await clock.advance(timedelta(days=1000).total_seconds())
        assert await secret(cluster, clock, rotate_days=0).read() == first

    asyncio.run(story())


def test_pods_that_knew_the_next_key_accept_it_when_it_signs(tmp_path: Path) -> None:
    before = KeyRing(new_private_key(), new_private_key())
    for name, text in before.public_keys().items():
        (tmp_path / name).write_text(text)
    after = rotated(before, new_private_key())
    token = sign(after.current, pod_uid="u", method="POST", path="/drain", body=b"{}", now=1000.0, token_id="1")
    ControlVerifier(tmp_path, "u", lambda: 1000.0).verify(token, "POST", "/drain", b"{}")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "has no current.pem, found nothing"),
        ({"other": "AA=="}, "found other"),
        ({"current.pem": "AA=="}, "not an Ed25519"),
    ],
)
def test_a_foreign_secret_is_named(data: dict[str, str], problem: str) -> None:
    async def story() -> None:
        clock = FakeClock()
        cluster = local_cluster(clock)
        metadata = {"name": "control", "namespace": "stoker"}
        await cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})
        with pytest.raises(BadKeys, match=problem):
            await secret(cluster, clock).read()

    asyncio.run(story())


def test_keys_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadKeys, match=r"current\.pem"):
        read_folder(tmp_path)
    (tmp_path / "current.pem").write_bytes(new_private_key())
    assert list(read_folder(tmp_path).public_keys()) == ["current.pem"]
