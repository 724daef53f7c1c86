"""Both doors to a cluster keep one contract: the embedded cluster's socket, and an API server with impersonation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.gateway.cluster.access import EmbeddedAccess, Identity
from stoker.gateway.cluster.interface import JOB, NODE, ApiError, Cluster, Selection, list_all
from stoker.gateway.config import EmbeddedConfig
from stoker.pod.log_position import LogRequest
from testing.gateway.world import JOB_SPEC, Which, World, world

Story = Callable[[World, Cluster], Awaitable[None]]
Tell = Callable[[Story], None]


@pytest.fixture(params=["embedded", "kubernetes"], name="tell")
def tell_cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Tell:
    """Run a story with the administrator's cluster, over real sockets."""
    which: Which = request.param

    def run(story: Story) -> None:
        async def told() -> None:
            async with world(which, tmp_path, sockets=True, history=20) as found:
                caller = await found.access.identify("k" * 43)
                await story(found, found.access.as_caller(caller))

        asyncio.run(told())

    return run


def manifest(name: str) -> dict[str, object]:
    return {"apiVersion": JOB.api_version, "kind": JOB.name, "metadata": {"name": name}, "spec": dict(JOB_SPEC)}


def test_create_read_patch_delete(tell: Tell) -> None:
    async def story(_: World, cluster: Cluster) -> None:
        made = await cluster.create(JOB, "default", manifest("one"))
        assert made["spec"]["optimization"]["optimizer"] == "adamw", "defaults are those of the definitions"
        assert (await cluster.get(JOB, "default", "one"))["metadata"]["uid"] == made["metadata"]["uid"]
        guarded = {"metadata": {"uid": made["metadata"]["uid"], "resourceVersion": made["metadata"]["resourceVersion"]}}
        patched = await cluster.patch(JOB, "default", "one", {"spec": {"run": {"suspend": True}}, **guarded})
        assert patched["spec"]["run"]["suspend"] is True
        with pytest.raises(ApiError) as stale:
            await cluster.patch(JOB, "default", "one", {"spec": {"run": {"suspend": False}}, **guarded})
        assert (stale.value.status, stale.value.reason) == (409, "Conflict")
        with pytest.raises(ApiError) as older:
            await cluster.delete(JOB, "default", "one", uid=made["metadata"]["uid"], version="1")
        with pytest.raises(ApiError) as other:
            await cluster.delete(JOB, "default", "one", uid="another")
        assert (older.value.status, other.value.status) == (409, 409)
        await cluster.delete(JOB, "default", "one", uid=made["metadata"]["uid"])
        with pytest.raises(ApiError) as gone:
            await cluster.get(JOB, "default", "one")
        assert (gone.value.status, gone.value.reason) == (404, "NotFound")

    tell(story)


def test_refusals_name_the_field(tell: Tell) -> None:
    async def story(_: World, cluster: Cluster) -> None:
        await cluster.create(JOB, "default", manifest("one"))
        with pytest.raises(ApiError) as taken:
            await cluster.create(JOB, "default", manifest("one"))
        assert (taken.value.status, taken.value.reason) == (409, "AlreadyExists")
        body = manifest("two")
        body["spec"] = {**JOB_SPEC, "parallelism": {"tensor": 0}, "nonsense": 1}
        with pytest.raises(ApiError) as wrong:
            await cluster.create(JOB, "default", body)
        assert wrong.value.status in (400, 422)
        assert "nonsense" in str(wrong.value)

    tell(story)


def test_pages_hold_everything_once(tell: Tell) -> None:
    async def story(found: World, cluster: Cluster) -> None:
        for number in range(7):
            found.job(f"job-{number}", namespace="default" if number % 2 else "team-a")
        everywhere, version = await list_all(cluster, JOB, Selection(), page=3)
        assert sorted(item["metadata"]["name"] for item in everywhere) == [f"job-{number}" for number in range(7)]
        assert int(version) > 0
        first = await cluster.list(JOB, Selection("team-a", metadata_only=True), limit=3)
        assert len(first.items) == 3
        assert first.after
        assert {frozenset(item) for item in first.items} == {frozenset(("kind", "apiVersion", "metadata"))}
        second = await cluster.list(JOB, Selection("team-a"), limit=3, after=first.after)
        assert (len(second.items), second.after) == (1, "")

    tell(story)


def test_a_watch_sees_changes_of_its_selection_and_ends_when_it_is_too_old(tell: Tell) -> None:
    async def story(found: World, cluster: Cluster) -> None:
        one = found.job("one")
        found.job("two")
        changes = await cluster.watch(JOB, Selection("default", name="one"), one["metadata"]["resourceVersion"])
        coming = asyncio.ensure_future(anext(changes))
        found.put_status(found.job("three"), phase="Running")
        found.put_status(one, phase="Running")
        change = await asyncio.wait_for(coming, 60)
        assert (change.type, change.object["status"]["phase"]) == ("MODIFIED", "Running")
        await changes.aclose()
        for number in range(30):
            found.put_status(one, message=str(number))
        with pytest.raises(ApiError) as old:
            await cluster.watch(JOB, Selection("default"), one["metadata"]["resourceVersion"])
        assert old.value.status == 410

    tell(story)


def test_logs_whole_by_tail_and_followed_to_the_end(tell: Tell) -> None:
    async def story(found: World, cluster: Cluster) -> None:
        pod = found.pod(found.job(), 0, "one\ntwo\rstill two\nthree\n")
        name = pod["metadata"]["name"]

        async def lines_of(**asked: Any) -> list[str]:
            parts = cluster.log("default", name, LogRequest(**asked), follow=False)
            return [line async for lines in parts for line in lines]

        assert await lines_of() == ["one", "two\rstill two", "three"]
        assert (await lines_of(tail=1), await lines_of(tail=0)) == (["three"], [])
        parts = cluster.log("default", name, LogRequest(tail=1), follow=True)
        assert [await anext(parts), await anext(parts)] == [[], ["three"]], "the answer begins before its first line"
        with found.folders.log("default", name).open("a") as stream:
            stream.write("four\nhalf")
        found.put_status(pod, phase="Succeeded")
        assert [line async for lines in parts for line in lines] == ["four", "half"]
        with pytest.raises(ApiError) as missing:
            await anext(cluster.log("default", "nothing", LogRequest(), follow=False))
        assert missing.value.status == 404

    tell(story)


def test_a_cluster_that_does_not_answer_is_no_refusal(tmp_path: Path) -> None:
    async def story() -> None:
        access = EmbeddedAccess(EmbeddedConfig(kind="embedded", socket=str(tmp_path / "none.sock"), key_file="key"))
        with pytest.raises(ApiError, match="the cluster does not answer") as silent:
            await access.check()
        assert silent.value.status == 0
        await access.close()

    asyncio.run(story())


def test_open_streams_keep_no_connection_from_other_requests(tmp_path: Path) -> None:
    """More watches than the client of other requests has connections; a request without one waits 15 s, then fails."""
    num_watches = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_watches
        while not reader.at_eof():
            head = b""
            while (line := await reader.readline()) not in (b"\r\n", b""):
                head += line
            if not head:
                break
            if b"watch=true" in head:
                num_watches += 1
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            else:
                body = b'{"metadata": {"resourceVersion": "1"}, "items": []}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    async def story() -> None:
        path = tmp_path / "supervisor.sock"
        config = EmbeddedConfig(kind="embedded", socket=str(path), key_file="key")
        server = await asyncio.start_unix_server(serve, path)
        access = EmbeddedAccess(config)
        cluster = access.as_caller(Identity("local"))
        watches = [await cluster.watch(NODE, Selection(), "1") for _ in range(120)]
        await access.check()
        for watch in watches:
            await watch.aclose()
        await access.close()
        server.close()

    asyncio.run(story())
    assert num_watches == 120
