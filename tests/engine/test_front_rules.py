"""Several fronts as one server, without processes: who gets a connection, what they have counted together, restarts."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from starlette.applications import Starlette

from stoker.engine.core.core_client import CoreClient
from stoker.engine.core.front_phase import front_phase
from stoker.engine.core.messages import CoreState, Phase, RequestFacts
from stoker.engine.fronts.acceptor import order
from stoker.engine.fronts.link import AskFailed, Link, LinkLost
from stoker.engine.fronts.pool import FrontPool, Pages
from stoker.engine.fronts.report import FrontReport, added, collected
from stoker.engine.fronts.restarts import DELAYS_S, WINDOW_S, RestartBudget
from stoker.engine.http.load_ledger import LoadLedger
from stoker.engine.http.load_reports import LoadReports
from stoker.engine.http.load_share import LoadShare, summed
from stoker.engine.http.metrics import FrontMetrics
from stoker.engine.sampling import SamplingParams
from stoker.pod.causes import Cause
from stoker.pod.http import probe_routes
from stoker.pod.http_limits import HttpLimits
from stoker.pod.http_protocol import SPARE_CONNECTIONS
from stoker.pod.serve import Server, bind_tcp
from testing.engine.serving import run, until


@dataclass
class Taker:
    """A front that takes every connection."""

    number: int
    ready: bool = True
    connections: int = 0
    usable: bool = True

    def offer(self, connection: socket.socket, offer: bytes) -> bool:
        raise AssertionError((connection, offer))


# Connections.


@given(st.integers(1, 8), st.lists(st.integers(0, 7), max_size=200))
def test_no_front_has_two_connections_more_than_another(count: int, closed: list[int]) -> None:
    """Whatever closes, the next connection goes to a front with the fewest; without closes they differ by one."""
    fronts, last = [Taker(number) for number in range(count)], -1
    for number in closed:
        chosen = order(fronts, last)[0]
        assert chosen.connections == min(front.connections for front in fronts)
        chosen.connections += 1  # type: ignore[misc]
        last = chosen.number
        victim = fronts[number % count]
        if number >= count and victim.connections:
            victim.connections -= 1
    if all(number < count for number in closed):
        counts = [front.connections for front in fronts]
        assert max(counts) - min(counts) <= 1


def test_equal_fronts_take_turns() -> None:
    fronts = [Taker(number) for number in range(3)]
    assert [[front.number for front in order(fronts, last)] for last in (-1, 0, 1, 2)] == [
        [0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2],
    ]  # fmt: skip


def test_a_front_that_serves_comes_before_emptier_ones_that_do_not() -> None:
    loading, serving, gone = Taker(0, ready=False), Taker(1, connections=9), Taker(2, usable=False)
    assert order([loading, serving, gone], -1) == [serving, loading]
    assert order([gone], -1) == []


def test_the_limit_on_connections_is_that_of_all_processes() -> None:
    async def scenario() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        server = Server(app, None, HttpLimits(max_connections=3))
        await server.start()
        for number, path, status in (
            (3, "/v1/models", 200),
            (4, "/v1/models", 503),
            (4, "/readyz", 200),
            (4 + SPARE_CONNECTIONS, "", 503),
        ):
            answer, ended = await ask(server, number, path)
            assert answer.startswith(b"HTTP/1.1 %d " % status), (number, path, answer)
            await asyncio.wait_for(ended.wait(), 30)
        await server.stop(1)

    run(scenario)


async def ask(server: Server, number: int, path: str) -> tuple[bytes, asyncio.Event]:
    """The answer on a connection that the server is given, and an event that is set at the connection's end."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ended = asyncio.Event()
    if path:  # else the answer comes before a request
        ours.sendall(b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
    await server.adopt(theirs, number, ended.set)
    reader, writer = await asyncio.open_connection(sock=ours)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer, ended


# The phase that clients see.


@pytest.mark.parametrize(
    ("core", "draining", "answers", "seen"),
    [
        ("Loading", False, True, "Loading"),
        ("Serving", False, False, "Warming"),
        ("Serving", False, True, "Serving"),
        ("Serving", True, False, "Draining"),
        ("Drained", True, True, "Drained"),
        ("Failed", False, True, "Failed"),
    ],
)
def test_an_engine_serves_when_core_and_front_do(core: Phase, draining: bool, answers: bool, seen: Phase) -> None:
    assert front_phase(core, draining=draining, answers=answers) == seen


def test_an_engine_whose_fronts_are_not_ready_is_warming() -> None:
    async def scenario() -> None:
        core = CoreClient("ipc:///nowhere")
        core.state = CoreState("Serving", "")
        pool = FrontPool(2, core, [bind_tcp("127.0.0.1", 0)], _no_command, Pages(dict, bytes, _no_drain))
        assert (pool.phase, pool.problem) == ("Warming", "no front is ready")
        pool.draining = True
        assert pool.phase == "Draining"
        await pool.close()
        await core.close()

    run(scenario)


def _no_command(number: int, identity: bytes, link: int, connections: int) -> Sequence[str]:
    raise AssertionError(number)


async def _no_drain(body: Any) -> Any:
    raise AssertionError(body)


# What fronts have counted.

OBSERVATIONS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(("http", "started", "first", "more", "finished")), st.integers(1, 40)),
    max_size=30,
)


def observe(metrics: FrontMetrics, kind: str, size: int) -> None:
    if kind == "http":
        metrics.answered("/v1/completions", "POST", 200 if size % 3 else 503, size / 4, size, 3 * size)
    elif kind == "started":
        metrics.arrived()
        metrics.started(SamplingParams(n=1 + size % 2, max_tokens=size))
    elif kind == "first":
        metrics.first_token(size / 8)
    elif kind == "more":
        metrics.more_tokens(size / 16, 1 + size % 4)
    else:
        metrics.finished(RequestFacts(size, size // 2, 1 + size, 0, 0.0, 0.25, 0.5, 0.5 + size, 1.0 + size))
        metrics.finished_request(size)


def samples(collector: Collector) -> dict[Any, float]:
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.value
        for family in collector.collect()
        for one in family.samples
        if not one.name.endswith("_created")
    }


@settings(max_examples=12, deadline=None)
@given(OBSERVATIONS)
def test_fronts_have_counted_together_what_one_front_counts(observations: list[tuple[int, str, int]]) -> None:
    registries = [CollectorRegistry() for _ in range(4)]
    metrics = [FrontMetrics(registry, "tiny") for registry in registries]
    for front, kind, size in observations:
        observe(metrics[front], kind, size)
        observe(metrics[3], kind, size)
    reports = [collected(registry, one.load) for registry, one in zip(registries, metrics, strict=True)]
    sent = [FrontReport.from_wire(msgpack.unpackb(msgpack.packb(report.to_wire()))) for report in reports[:3]]
    total = added(sent)
    expected = samples(registries[3])
    found = {
        key: value
        for family in total.families.values()
        for key, value in family.samples.items()
        if not key[0].endswith("_created")
    }
    assert found.keys() >= expected.keys()
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert total.counters.to_wire() == metrics[3].load.to_wire()
    names = {family.name for family in registries[3].collect()}
    assert {family.to_metric().name for family in total.families.values()} == names


def test_the_load_of_fronts_adds_up() -> None:
    reports = LoadReports(LoadLedger())
    reports.others = [LoadShare(2, 3, 70, 100.0, None), LoadShare(1, 0, 0, 300.0, 0.25)]
    with reports.ledger.job("a", 30):
        report = reports.report()
        assert (report["requests"], report["waiting"], report["waiting_tokens"]) == (7, 4, 100)
        assert (report["prefill_tokens_per_s"], report["gap_s"]) == (200.0, 0.25)
    assert summed(()) == LoadShare()


def test_a_report_of_another_front_is_newer_than_those_before() -> None:
    """A router that loses its stream goes on at another front, which knows nothing of the numbers sent so far."""

    async def scenario() -> None:
        now = [5.0]
        one, two = (LoadReports(LoadLedger(), clock=lambda: now[0]) for _ in range(2))
        numbers = []
        for front in (one, two, one):
            reports = front.stream(lambda: True)
            for _ in range(2):
                event = await anext(reports)
                numbers.append(int(event.split(b'"seq":')[1].split(b",")[0]))
                front.ledger.waiting[str(now[0])] = 1  # a change, which is reported
                now[0] += 0.1
            await reports.aclose()
        assert numbers == sorted(set(numbers)), numbers

    run(scenario)


# Restarts.


def test_restarts_are_bounded_within_a_window() -> None:
    budget = RestartBudget()
    assert [budget.take(float(number)) for number in range(len(DELAYS_S))] == list(DELAYS_S)
    assert budget.take(WINDOW_S - 1) is None
    assert budget.take(WINDOW_S + 10) == 0.0


@pytest.mark.parametrize(
    ("code", "ended"), [("raise SystemExit(3)", "code 3"), ("import os; os.kill(os.getpid(), 9)", "SIGKILL")]
)
def test_fronts_that_keep_ending_end_the_engine_with_a_cause(code: str, ended: str) -> None:
    def command(number: int, identity: bytes, link: int, connections: int) -> Sequence[str]:
        return [sys.executable, "-S", "-c", code]

    async def scenario() -> None:
        core = CoreClient("ipc:///nowhere")
        pages = Pages(dict, bytes, _no_drain)
        pool = FrontPool(1, core, [bind_tcp("127.0.0.1", 0)], command, pages, budget=RestartBudget((0.0, 0.0)))
        reasons: list[str] = []
        pool.on_broken = reasons.append
        await pool.start()
        assert pool.broken_cause is Cause.INTERNAL
        assert len(reasons) == 1
        assert ended in reasons[0]
        assert pool.problem == reasons[0]
        assert (pool.restarts, pool.ready) == (2, False)
        await pool.close()
        await core.close()

    run(scenario)


# The link.


def test_both_ends_of_a_link_ask_and_tell() -> None:
    async def scenario() -> None:
        told: list[Any] = []

        async def double(value: int) -> int:
            return 2 * value

        async def refuse(value: str) -> None:
            raise ValueError(f"not {value}")

        async def note(value: Any) -> None:
            told.append(value)

        async def never(_: Any) -> None:
            await asyncio.Event().wait()

        ends = socket.socketpair()
        one = Link(ends[0], {"double": double, "note": note})
        two = Link(ends[1], {"refuse": refuse, "never": never})
        running = [asyncio.create_task(link.run()) for link in (one, two)]
        await one.opened.wait()
        await two.opened.wait()
        assert await asyncio.gather(*(two.ask("double", number) for number in range(20))) == list(range(0, 40, 2))
        with pytest.raises(AskFailed, match="not this"):
            await one.ask("refuse", "this")
        with pytest.raises(LinkLost, match="no answer to never"):
            await one.ask("never", timeout_s=0.01)
        two.tell("note", {"text": "ä" * 100_000})
        await until(lambda: len(told) == 1)
        assert told == [{"text": "ä" * 100_000}]
        hanging = asyncio.create_task(one.ask("never", timeout_s=60))
        await asyncio.sleep(0)
        two.close()
        with pytest.raises(LinkLost, match="has gone"):
            await hanging
        with pytest.raises(LinkLost, match="has gone"):
            await one.ask("refuse", "again")
        await asyncio.gather(*running)

    run(scenario)


def test_pages_of_all_processes_may_be_awaited() -> None:
    async def scenario() -> None:
        async def status() -> dict[str, Any]:
            return {"fronts": 2}

        async def metrics() -> bytes:
            return b"x 1\n"

        app = Starlette(routes=probe_routes(alive=lambda: True, ready=lambda: True, status=status, registry=metrics))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://x") as http:
            assert (await http.get("/status")).json() == {"fronts": 2}
            assert (await http.get("/metrics")).text == "x 1\n"

    run(scenario)
