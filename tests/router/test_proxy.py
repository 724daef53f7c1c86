"""The router as its clients see it, over fakes that break at chosen places."""

from __future__ import annotations

import asyncio
import json
import time

from testing.router.fake_engine import Exchange, FakeEngine, say_hello, stream
from testing.router.harness import events, routed, run, until


def test_a_request_passes_with_its_credentials_and_its_id() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(engine) as (_, client):
            headers = {"Authorization": "Bearer k", "X-Request-Id": "r-1", "Connection": "keep-alive"}
            answer = await client.post("/v1/completions?x=1", content=b'{"prompt": "p"}', headers=headers)
            seen = answer.json()
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "r-1")
            assert (seen["path"], seen["body"]) == ("/v1/completions?x=1", '{"prompt": "p"}')
            assert (seen["headers"]["authorization"], seen["headers"]["x-request-id"]) == ("Bearer k", "r-1")
            assert "connection" not in seen["headers"]

    run(scenario)


def test_a_header_that_clients_may_not_send_is_no_failure_of_the_backend() -> None:
    async def ask(port: int, header: bytes) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return int(head.split()[1]), body

    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(engine) as (router, client):
            port = client.base_url.port or 0
            status, body = await ask(port, b"Authorization: Bearer ")  # a client without a key
            assert (status, json.loads(body)["headers"]["authorization"]) == (200, "Bearer")
            status, body = await ask(port, b"X-Note: a\x01b")
            assert status == 400
            status, body = await ask(port, b"Connection: x-hop, keep-alive\r\nX-Hop: 1\r\nX-End: 2")
            assert {"x-hop", "x-end", "connection"} & set(json.loads(body)["headers"]) == {"x-end"}
            assert len(router.backends.ready) == 1
            assert (await client.get("/v1/models")).status_code == 200

    run(scenario)


def test_a_request_without_an_id_gets_one_on_both_sides() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(engine) as (_, client):
            answer = await client.get("/v1/models")
            assert answer.headers["x-request-id"] == answer.json()["headers"]["x-request-id"] != ""

    run(scenario)


def test_a_stream_is_passed_on_event_by_event() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def two_halves(exchange: Exchange) -> None:
            await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
            await exchange.data('data: {"n": 0}\n\ndata: {"n"')
            await release.wait()
            await exchange.data(": 1}\n\ndata: [DONE]\n\n")
            await exchange.end()

        engine = await FakeEngine("a", two_halves).start()
        async with routed(engine) as (_, client), client.stream("POST", "/v1/completions", content=b"{}") as answer:
            chunks = answer.aiter_text()
            assert await anext(chunks) == 'data: {"n": 0}\n\n'  # before the backend has sent the rest
            release.set()
            assert "".join([part async for part in chunks]) == 'data: {"n": 1}\n\ndata: [DONE]\n\n'

    run(scenario)


def test_a_backend_killed_before_its_first_byte_costs_the_client_nothing() -> None:
    async def scenario() -> None:
        async def dies(exchange: Exchange) -> None:
            exchange.engine.kill()

        bad, good = await FakeEngine("bad", dies).start(), await FakeEngine("good").start()
        async with routed(bad, good) as (router, client):
            answers = [(await client.post("/v1/completions", content=b"{}")).json()["pod"] for _ in range(6)]
            assert answers == ["good"] * 6
            assert [b.entry.pod_uid for b in router.backends.ready] == ["good"]
            assert router.metrics.retries._value.get() == 1  # ejected at once, not tried again

    run(scenario)


def test_a_backend_killed_after_its_head_but_before_its_first_event_is_retried_too() -> None:
    async def scenario() -> None:
        async def dies(exchange: Exchange) -> None:
            await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
            exchange.engine.kill()

        bad, good = await FakeEngine("bad", dies).start(), await FakeEngine("good", stream(2)).start()
        async with routed(bad, good) as (_, client):
            for _ in range(2):
                answer = await client.post("/v1/completions", content=b"{}")
                assert events(answer.text) == [{"pod": "good", "n": 0}, {"pod": "good", "n": 1}, "[DONE]"]

    run(scenario)


def test_a_backend_killed_in_mid_stream_ends_the_stream_with_an_error_event() -> None:
    async def scenario() -> None:
        async def dies(exchange: Exchange) -> None:
            await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
            await exchange.data('data: {"n": 0}\n\ndata: {"n"')
            await asyncio.sleep(0.05)
            exchange.engine.kill()

        bad, good = await FakeEngine("bad", dies).start(), await FakeEngine("good").start()
        async with routed(bad, good, policy="roundRobin") as (router, client):
            texts = [(await client.post("/v1/completions", content=b"{}")).text for _ in range(2)]
            cut = next(text for text in texts if "data:" in text)
            first, error, done = events(cut)  # the half event did not reach the client
            assert (first, error["error"]["code"], done) == ({"n": 0}, "backend_lost", "[DONE]")
            assert good.served == 1  # nothing was sent twice
            assert router.metrics.cut._value.get() == 1

    run(scenario)


def test_a_kept_connection_that_the_backend_closed_is_no_failure() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(engine, hold_s=30.0) as (router, client):  # a probe may lose its connection, too
            for _ in range(3):
                assert (await client.get("/v1/models")).status_code == 200
                engine.drop_connections()
            assert router.metrics.retries._value.get() == 0

    run(scenario)


def test_connections_are_kept_and_each_new_one_is_asked_who_answers() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(engine) as (_, client):
            for _ in range(20):
                await client.get("/v1/models")
            assert engine.connections == 2  # one for probes, one for requests

    run(scenario)


def test_another_pod_at_the_same_address_gets_nothing() -> None:
    async def scenario() -> None:
        old = await FakeEngine("old").start()
        async with routed(old) as (router, client):
            assert (await client.get("/v1/models")).json()["pod"] == "old"
            old.kill()
            new = FakeEngine("new")
            new.port = old.port
            await new.start()
            answer = await client.get("/v1/models")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_backend")
            await until(lambda: "pod old was expected, new answers" in router.backends.all[0].problem)
            assert new.served == 0
            new.kill()

    run(scenario)


def test_a_busy_answer_is_tried_elsewhere_and_passed_on_when_all_are_busy() -> None:
    async def scenario() -> None:
        async def busy(exchange: Exchange) -> None:
            await exchange.json({"error": {"message": "full"}}, 429, **{"retry-after": "3"})

        full, other = await FakeEngine("full", busy).start(), await FakeEngine("other").start()
        async with routed(full, other) as (_, client):
            assert {(await client.get("/v1/models")).status_code for _ in range(4)} == {200}
            other.behaviour = busy
            answer = await client.get("/v1/models")
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
            assert answer.json() == {"error": {"message": "full"}}

    run(scenario)


def test_an_error_of_the_engine_is_passed_on_and_not_repeated() -> None:
    async def scenario() -> None:
        async def fails(exchange: Exchange) -> None:
            exchange.engine.served += 1
            await exchange.json({"error": {"message": "x"}}, 500)

        a, b = await FakeEngine("a", fails).start(), await FakeEngine("b", fails).start()
        async with routed(a, b) as (_, client):
            assert (await client.post("/v1/completions", content=b"{}")).status_code == 500
            assert a.served + b.served == 2  # once in `fails`, once as answered: one request in all

    run(scenario)


def test_without_a_backend_the_answer_is_503_with_retry_after() -> None:
    async def scenario() -> None:
        async with routed() as (_, client):
            answer = await client.post("/v1/completions", content=b"{}")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"] == {
                "message": "No engine can serve the request now: no engine is ready. Try again later.",
                "type": "server_error",
                "param": None,
                "code": "no_backend",
            }
            assert (await client.get("/readyz")).status_code == 200  # the router itself is fine
            assert (await client.get("/health")).status_code == 503

    run(scenario)


def test_a_held_request_is_answered_when_a_backend_comes_and_only_so_many_are_held() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(hold_s=60, max_held_requests=2) as (router, client):
            waiting = [asyncio.ensure_future(client.get("/v1/models")) for _ in range(2)]
            await until(lambda: router.metrics.held == 2)
            assert (await client.get("/v1/models")).status_code == 503  # the third is one too many
            await client.put("/backends", json={"version": 2, "backends": [engine.entry()]})
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
            assert router.metrics.held == 0
        engine.kill()

    run(scenario)


def test_a_held_request_is_refused_when_its_time_is_over() -> None:
    async def scenario() -> None:
        async with routed(hold_s=0.2) as (_, client):
            begun = time.monotonic()
            assert (await client.get("/v1/models")).status_code == 503
            assert time.monotonic() - begun > 0.15

    run(scenario)


def test_a_client_that_leaves_ends_the_work_at_the_backend() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a", stream(1000, 0.02)).start()
        async with routed(engine) as (router, client):
            async with client.stream("POST", "/v1/completions", content=b"{}") as answer:
                await anext(answer.aiter_text())
            await until(lambda: engine.disconnects == 1)

            async def forever(exchange: Exchange) -> None:
                await asyncio.sleep(60)

            engine.behaviour = forever  # and while nothing has been answered yet
            request = asyncio.ensure_future(client.post("/v1/completions", content=b"{}"))
            await until(lambda: engine.running == 1)
            request.cancel()
            await until(lambda: engine.disconnects == 2 and router.proxy.running == 0)
            assert router.backends.all[0].pending == 0
            assert router.metrics.left._value.get() == 2

    run(scenario)


def test_a_body_that_is_too_large_is_refused() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(engine, max_body_bytes=100) as (_, client):
            answer = await client.post("/v1/completions", content=b"x" * 101)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
            assert (await client.post("/v1/completions", content=b"x" * 100)).status_code == 200

    run(scenario)


def test_a_silent_backend_is_given_up_and_the_request_not_repeated() -> None:
    async def scenario() -> None:
        async def silent(exchange: Exchange) -> None:
            await asyncio.sleep(60)

        a, b = await FakeEngine("a", silent).start(), await FakeEngine("b", silent).start()
        async with routed(a, b, request_timeout_s=1) as (_, client):
            answer = await client.post("/v1/completions", content=b"{}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
            await until(lambda: a.disconnects + b.disconnects == 1)

    run(scenario)


def test_control_and_unknown_paths_do_not_reach_an_engine() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a").start()
        async with routed(engine) as (_, client):
            for path in ("/drain", "/v1", "/etc", "/v11/x", "/chat/completions"):
                answer = await client.post(path, content=b"{}")
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (404, "unknown_path")
                assert error["message"].startswith(f"Unknown path {path}; the API's paths begin with /v1/")
            assert engine.served == 0
            wrong = await client.post("/health")
            assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
            assert wrong.json()["error"]["code"] == "method_not_allowed"

    run(scenario)


def test_many_concurrent_streams_arrive_whole() -> None:
    async def scenario() -> None:
        release = asyncio.Event()

        async def waits(exchange: Exchange) -> None:
            await release.wait()
            await stream(20, 0.001)(exchange)

        engines = [await FakeEngine(name, waits).start() for name in "abc"]
        async with routed(*engines) as (router, client):
            asked = [asyncio.ensure_future(client.post("/v1/completions", content=b"{}")) for _ in range(150)]
            await until(lambda: sum(engine.running for engine in engines) == 150)
            assert [engine.running for engine in engines] == [50] * 3  # least pending spreads them
            release.set()
            for answer in await asyncio.gather(*asked):
                parts = events(answer.text)
                assert [part["n"] for part in parts[:-1]] == list(range(20))
            assert sum(backend.pending for backend in router.backends.all) == 0

    run(scenario)


def test_status_lists_the_backends() -> None:
    async def scenario() -> None:
        engine = await FakeEngine("a", say_hello).start()
        async with routed(engine) as (_, client):
            status = (await client.get("/status")).json()
            assert status["backends"] == [
                {"url": engine.url, "pod_uid": "a", "healthy": True, "pending": 0, "ranks": [], "draining": False,
                 "revision": "", "role": "colocated", "epoch": "", "peer": None, "problem": ""}
            ]  # fmt: skip
            expected = {"program": "router", "pod_uid": "router-0", "snapshot_version": 1, "ready_backends": 1}
            assert expected.items() <= status.items()
            metrics = (await client.get("/metrics")).text
            assert "stoker_router_ready_backends 1.0" in metrics
            assert json.dumps(engine.url) in metrics

    run(scenario)
