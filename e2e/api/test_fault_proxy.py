"""The fault proxy before a small upstream: requests that pass, faults, counters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from e2e.api.access import Access
from e2e.api.api_call import ApiCall, parse_call
from e2e.api.fault_proxy import FaultProxy
from e2e.api.faults import (
    CONFLICT,
    GONE,
    TOO_MANY,
    AtWrite,
    CutWatch,
    Drop,
    Fault,
    FaultPlan,
    Hang,
    Hold,
    Rule,
    Script,
    Seeded,
    Slow,
)

PODS = "/api/v1/namespaces/a/pods"
Story = Callable[[FaultProxy, aiohttp.ClientSession, list[str]], Awaitable[None]]


def run(story: Story, plan: FaultPlan | None = None) -> None:
    """Run a story against an upstream that answers every request, and a watch with five events."""
    seen: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(f"{request.method} {request.raw_path}")
        if "watch" not in request.query:
            return web.json_response({"body": (await request.read()).decode()}, headers={"X-Kept": "yes"})
        stream = web.StreamResponse()
        await stream.prepare(request)
        for number in range(5):
            await stream.write(json.dumps({"type": "ADDED", "number": number}).encode() + b"\n")
        await stream.write_eof()
        return stream

    async def whole() -> None:
        runner = web.ServerRunner(web.Server(answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        upstream = Access("http://{}:{}".format(*runner.addresses[0][:2]))
        try:
            async with FaultProxy(upstream, plan) as proxy, aiohttp.ClientSession(proxy.url) as client:
                await story(proxy, client, seen)
        finally:
            await runner.cleanup()

    asyncio.run(whole())


@pytest.mark.parametrize(
    ("method", "path", "query", "content_type", "call"),
    [
        ("GET", "/api/v1/pods", {}, "", ApiCall("list", "pods")),
        ("GET", PODS, {"watch": "true"}, "", ApiCall("watch", "pods", namespace="a")),
        ("GET", f"{PODS}/b", {}, "", ApiCall("get", "pods", "", "a", "b")),
        ("POST", PODS, {}, "", ApiCall("create", "pods", namespace="a")),
        ("PATCH", f"{PODS}/b/status", {}, "application/merge-patch+json", ApiCall("patch", "pods", "status", "a", "b")),
        (
            "PATCH",
            "/apis/stoker.dev/v1alpha1/namespaces/a/enginepools/b",
            {},
            "application/apply-patch+yaml",
            ApiCall("apply", "enginepools", "", "a", "b"),
        ),
        ("DELETE", PODS, {}, "", ApiCall("deletecollection", "pods", namespace="a")),
        (
            "PUT",
            "/apis/coordination.k8s.io/v1/namespaces/a/leases/b",
            {},
            "",
            ApiCall("update", "leases", "", "a", "b"),
        ),
        ("GET", "/api/v1/namespaces/a", {}, "", ApiCall("get", "namespaces", "", "", "a")),
        ("PUT", "/api/v1/namespaces/a/finalize", {}, "", ApiCall("update", "namespaces", "finalize", "", "a")),
        ("GET", "/apis/stoker.dev/v1alpha1", {}, "", None),
        ("GET", "/readyz", {}, "", None),
    ],
)  # fmt: skip
def test_a_request_is_named_as_rbac_names_it(
    method: str, path: str, query: dict[str, str], content_type: str, call: ApiCall | None
) -> None:
    assert parse_call(method, path, query, content_type) == call


def test_without_a_plan_everything_passes_and_is_counted() -> None:
    async def story(proxy: FaultProxy, client: aiohttp.ClientSession, seen: list[str]) -> None:
        answer = await client.post(URL(f"{PODS}?fieldManager=a%2Fb", encoded=True), data=b"text")
        assert (answer.status, answer.headers["X-Kept"], await answer.json()) == (200, "yes", {"body": "text"})
        watch = await client.get(PODS, params={"watch": "true"})
        assert len((await watch.text()).splitlines()) == 5
        assert seen == [f"POST {PODS}?fieldManager=a%2Fb", f"GET {PODS}?watch=true"]
        assert proxy.counts == {("create", "pods"): 1, ("watch", "pods"): 1}
        assert proxy.calls == [ApiCall("create", "pods", namespace="a")]

    run(story)


def test_a_refusal_is_a_status_and_reaches_no_server() -> None:
    async def story(proxy: FaultProxy, client: aiohttp.ClientSession, seen: list[str]) -> None:
        answer = await client.post(PODS)
        body = await answer.json()
        assert (answer.status, answer.headers["Retry-After"], body["reason"]) == (429, "1", "TooManyRequests")
        assert seen == []
        assert (await client.post(PODS)).status == 200
        assert proxy.injected == [(ApiCall("create", "pods", namespace="a"), TOO_MANY)]

    run(story, Script((Rule(TOO_MANY, "create", "pods"),)))


@pytest.mark.parametrize(("after", "acted"), [(False, 0), (True, 1)])
def test_a_connection_is_dropped_before_or_after_the_server_acted(after: bool, acted: int) -> None:
    async def story(_: FaultProxy, client: aiohttp.ClientSession, seen: list[str]) -> None:
        with pytest.raises(aiohttp.ClientError):
            await client.post(PODS)
        assert len(seen) == acted
        assert (await client.post(PODS)).status == 200

    run(story, Script((Rule(Drop(after), "create"),)))


@pytest.mark.parametrize(("how", "last"), [("gone", 410), ("error", 500), ("end", None)])
def test_a_watch_ends_after_some_events(how: str, last: int | None) -> None:
    async def story(_: FaultProxy, client: aiohttp.ClientSession, seen: list[str]) -> None:
        lines = [
            json.loads(line) for line in (await (await client.get(PODS, params={"watch": "1"})).text()).splitlines()
        ]
        codes = [line["object"]["code"] for line in lines if line["type"] == "ERROR"]
        assert [line["number"] for line in lines if line["type"] == "ADDED"] == [0, 1]
        assert codes == ([last] if last else [])

    run(story, Script((Rule(CutWatch(how, 2), "watch"),)))  # type: ignore[arg-type]


def test_a_dropped_watch_breaks_in_the_middle() -> None:
    async def story(_: FaultProxy, client: aiohttp.ClientSession, seen: list[str]) -> None:
        answer = await client.get(PODS, params={"watch": "1"})
        with pytest.raises(aiohttp.ClientError):
            await answer.text()

    run(story, Script((Rule(CutWatch("drop", 1), "watch"),)))


def test_a_hanging_write_has_happened_and_never_answers() -> None:
    async def story(proxy: FaultProxy, client: aiohttp.ClientSession, seen: list[str]) -> None:
        assert (await client.post(PODS)).status == 200
        waiting = asyncio.ensure_future(client.delete(f"{PODS}/b"))
        await asyncio.wait_for(proxy.hung.wait(), 120)
        assert len(seen) == 2
        assert not waiting.done()
        waiting.cancel()

    run(story, AtWrite(2, Hang()))


def test_a_held_write_arrives_after_its_sender_is_gone() -> None:
    async def story(proxy: FaultProxy, client: aiohttp.ClientSession, seen: list[str]) -> None:
        waiting = asyncio.ensure_future(client.post(PODS, data=b"text"))
        await asyncio.wait_for(proxy.hung.wait(), 120)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert seen == []
        proxy.released.set()
        await asyncio.gather(*proxy.late)
        assert seen == [f"POST {PODS}"]

    run(story, AtWrite(1, Hold()))


def test_a_slow_list_comes_late() -> None:
    async def story(_: FaultProxy, client: aiohttp.ClientSession, seen: list[str]) -> None:
        started = asyncio.get_running_loop().time()
        assert (await client.get(PODS)).status == 200
        assert asyncio.get_running_loop().time() - started >= 0.2

    run(story, Script((Rule(Slow(0.2), "list"),)))


def test_the_same_seed_fails_the_same_calls_in_any_order() -> None:
    calls = [
        (ApiCall(verb, what), number)
        for verb in ("create", "list", "watch")
        for what in ("pods", "leases")
        for number in range(1, 40)
    ]

    def faults(seed: int, order: int) -> dict[tuple[ApiCall, int], Fault | None]:
        plan = Seeded(seed, 0.5)
        return {(call, number): plan.fault(call, number, 0) for call, number in calls[::order]}

    assert faults(1, 1) == faults(1, -1)
    assert faults(1, 1) != faults(2, 1)
    assert {type(fault) for (call, _), fault in faults(1, 1).items() if call.verb == "watch" and fault} >= {CutWatch}
    assert all(fault is None for (_, number), fault in faults(1, 1).items() if number > 30)
    assert {CONFLICT, GONE} <= set(faults(1, 1).values())
