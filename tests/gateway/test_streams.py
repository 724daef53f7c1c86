"""Streams: changes as events that a client resumes, logs of all ranks, the history of a run's metrics."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.gateway.cluster.interface import JOB, ApiError, Change, Page, Selection
from stoker.gateway.domain.log_lines import LogLine, log_line, metric_samples
from stoker.gateway.domain.views import job_view
from stoker.gateway.http.pod_logs import merged
from stoker.gateway.http.stream import pause_s, watched, with_heartbeat
from stoker.gateway.problem import Problem
from stoker.trainer.agent.console import step_line
from stoker.trainer.protocol.messages import StepEvent
from testing.gateway.world import World, world

Tell = Callable[..., None]
JOBS = "/v1/training/jobs"


async def events(answer: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any], str]]:
    """Parse server-sent events: name, data, id."""
    fields: dict[str, str] = {}
    async for line in answer.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields["event"], json.loads(fields["data"]), fields.get("id", "")
            fields = {}


async def take(stream: AsyncIterator[Any], count: int) -> list[Any]:
    return [await asyncio.wait_for(anext(stream), 60) for _ in range(count)]


def test_a_watch_is_resumed_where_it_ended(tell: Tell) -> None:
    async def story(found: World) -> None:
        one = found.job("one")
        async with found.client.stream("GET", JOBS, params={"watch": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            stream = events(answer)
            first = await take(stream, 2)
            assert [(name, data.get("job_name")) for name, data, _ in first] == [("ADDED", "one"), ("BOOKMARK", None)]
            found.put_status(one, phase="Running")
            ((name, data, number),) = await take(stream, 1)
            assert (name, data["status"], number) == ("MODIFIED", "RUNNING", data["resource_version"])
        found.put_status(one, phase="Checkpointing")
        found.job("two")
        resume = {"Accept": "text/event-stream", "Last-Event-ID": number}
        async with found.client.stream("GET", JOBS, headers=resume) as answer:
            seen = await take(events(answer), 3)
        assert [(name, data.get("status")) for name, data, _ in seen] == [
            ("BOOKMARK", None),
            ("MODIFIED", "CHECKPOINTING"),
            ("ADDED", "PENDING"),
        ]

    tell(story, sockets=True)


def test_a_client_that_is_cut_off_among_the_first_objects_begins_anew(tell: Tell) -> None:
    """The first object may be newer than the others, so its version is no place to go on from."""

    async def story(found: World) -> None:
        one = found.job("one")
        found.job("two")
        found.put_status(one, phase="Running")
        async with found.client.stream("GET", JOBS, params={"watch": True}) as answer:
            ((_, first, number),) = await take(events(answer), 1)
        headers = {"Accept": "text/event-stream", "Last-Event-ID": number}
        async with found.client.stream("GET", JOBS, headers=headers) as answer:
            again = await take(events(answer), 3)
        assert first["job_name"] == "one"
        assert [data.get("job_name") for _, data, _ in again] == ["one", "two", None]
        assert again[-1][2] == again[-1][1]["resource_version"], "the place to go on from"

    tell(story, sockets=True)


def test_a_watch_of_some_states_ends_jobs_that_leave_them(tell: Tell) -> None:
    async def story(found: World) -> None:
        one = found.put_status(found.job("one"), phase="Running")
        found.job("two")
        query: dict[str, Any] = {"watch": True, "status": ["RUNNING", "CHECKPOINTING"]}
        async with found.client.stream("GET", JOBS, params=query) as answer:
            stream = events(answer)
            first = await take(stream, 2)
            assert [(name, data.get("job_name")) for name, data, _ in first] == [("ADDED", "one"), ("BOOKMARK", None)]
            found.put_status(one, phase="Checkpointing")
            found.put_status(one, phase="Completed")
            seen = await take(stream, 2)
        assert [(name, data["status"]) for name, data, _ in seen] == [
            ("MODIFIED", "CHECKPOINTING"),
            ("DELETED", "COMPLETED"),
        ]
        for name in ("continue", "limit"):
            paged = await found.client.get(JOBS, params={"watch": True, name: "3"})
            assert (paged.status_code, paged.json()["errors"][0]["field"]) == (422, f"query.{name}")

    tell(story, sockets=True)


def test_a_watch_of_one_job_shows_that_job_alone(tell: Tell) -> None:
    async def story(found: World) -> None:
        one, two = found.job("one"), found.job("two")
        async with found.client.stream("GET", f"{JOBS}/two", params={"watch": True}) as answer:
            stream = events(answer)
            await take(stream, 2)
            found.put_status(one, phase="Running")
            found.put_status(two, phase="Failed")
            ((_, data, _),) = await take(stream, 1)
        assert (data["job_name"], data["status"]) == ("two", "FAILED")

    tell(story, sockets=True)


def test_a_version_that_is_too_old_is_an_answer_of_its_own(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.job()
        for number in range(9):
            found.put_status(job, message=str(number))
        answer = await found.client.get(JOBS, params={"watch": True, "resource_version": "1"})
        assert (answer.status_code, answer.json()["type"]) == (410, "urn:stoker:problem:expired")

    tell(story, sockets=True, history=3)


def test_logs_of_all_pods_of_the_newest_attempt(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Running")
        found.pod(job, 0, "old\n", attempt=0, phase="Failed")
        pods = [found.pod(job, rank, f"rank {rank} one\nrank {rank} two\n", attempt=1) for rank in range(2)]
        found.pod(found.job("other"), 0, "not ours\n")
        whole = await found.client.get(f"{JOBS}/run/logs")
        assert whole.text.splitlines() == [f"[run-a1-{r}] rank {r} {n}" for r in range(2) for n in ("one", "two")]
        assert (await found.client.get(f"{JOBS}/run/logs", params={"attempt": 0})).text == "old\n"
        last = await found.client.get(f"{JOBS}/run/logs", params={"tail_lines": 1})
        assert last.text.splitlines() == ["[run-a1-0] rank 0 two", "[run-a1-1] rank 1 two"]
        accept = {"Accept": "text/event-stream"}
        async with found.client.stream("GET", f"{JOBS}/run/logs", params={"follow": True}, headers=accept) as answer:
            stream = events(answer)
            begun = await take(stream, 6)
            assert [data for name, data, _ in begun if name == "POD"] == [
                {"pod": f"run-a1-{r}", "attempt": 1} for r in range(2)
            ]
            assert {(data["pod"], data["text"]) for name, data, _ in begun if name == "LINE"} == {
                (f"run-a1-{r}", f"rank {r} {n}") for r in range(2) for n in ("one", "two")
            }
            with found.folders.log("default", "run-a1-1").open("a") as log:
                log.write("rank 1 three\n")
            ((_, data, _),) = await take(stream, 1)
            assert data == {"time": None, "pod": "run-a1-1", "text": "rank 1 three"}
            for pod in pods:
                found.put_status(pod, phase="Succeeded")
            found.pod(job, 0, "next\n", attempt=2, phase="Succeeded")
            later = [(name, data.get("text")) for name, data, _ in await take(stream, 2)]
            assert later == [("POD", None), ("LINE", "next")]
            found.put_status(job, phase="Completed")
            assert [(name, data) async for name, data, _ in stream] == [("END", {})]
        tail = {"follow": True, "tail_lines": 1, "attempt": 1}
        ended = await found.client.get(f"{JOBS}/run/logs", params=tail)
        assert sorted(ended.text.splitlines()) == ["[run-a1-0] rank 0 two", "[run-a1-1] rank 1 three"]
        nothing = await found.client.get(f"{JOBS}/other/logs", params={"attempt": 3})
        assert (nothing.status_code, "no pod of attempt 3" in nothing.json()["detail"]) == (404, True)
        both = await found.client.get(f"{JOBS}/run/logs", params={"from_attempt": 1})
        assert [text[:10] for text in both.text.splitlines()] == ["[run-a1-0]"] * 2 + ["[run-a1-1]"] * 3 + [
            "[run-a2-0]"
        ]

    tell(story, sockets=True)


def test_a_followed_log_waits_for_containers_that_have_not_started(tmp_path: Path) -> None:
    async def story() -> None:
        async with world("kubernetes", tmp_path, sockets=True) as found:
            assert found.server is not None
            job = found.put_status(found.job(), phase="Starting")
            late, never = found.pod(job, 0, "late one\n"), found.pod(job, 1, "")
            found.server.unstarted |= {"run-a0-0", "run-a0-1"}
            assert (await found.client.get(f"{JOBS}/run/logs")).text == "", "what is there now"
            async with found.client.stream("GET", f"{JOBS}/run/logs", params={"follow": True}) as answer:
                lines = answer.aiter_lines()
                found.put_status(never, phase="Failed")
                found.server.unstarted.discard("run-a0-0")
                assert await asyncio.wait_for(anext(lines), 60) == "[run-a0-0] late one"
                found.put_status(late, phase="Succeeded")
                found.put_status(job, phase="Completed")
                assert [one async for one in lines] == []

    asyncio.run(story())


class EndedWatch:
    """A watch that the cluster ends at once."""

    def __aiter__(self) -> EndedWatch:
        return self

    async def __anext__(self) -> Change:
        raise StopAsyncIteration

    async def aclose(self) -> None: ...


class Caller:
    """A caller whose token is good for one more review."""

    def __init__(self) -> None:
        self.cluster, self.reviews = self, 0

    async def renewed(self) -> Caller:
        self.reviews += 1
        if self.reviews > 1:
            raise Problem(401, "unauthenticated", "the cluster does not know this token")
        return self

    async def list(self, *_: object, **__: object) -> Page:
        return Page([], "7")

    async def watch(self, *_: object) -> EndedWatch:
        return EndedWatch()


async def at_once(_: float) -> None:
    """Sleep in no time."""


def test_a_stream_ends_when_its_token_does() -> None:
    async def story() -> None:
        caller = Caller()
        answer = await watched(caller, JOB, Selection("default"), "7", job_view, sleep=at_once)  # type: ignore[arg-type]
        parts = [bytes(part).decode() async for part in answer.body_iterator]  # type: ignore[arg-type]
        assert [part.split("\n")[0] for part in parts] == ["id: 7", "event: ERROR"]
        assert json.loads(parts[1].split("data: ")[1])["status"] == 401
        assert caller.reviews == 2

    asyncio.run(story())


class TalkingCaller(Caller):
    """A caller whose fourth watch shows a change; its token is good for nine watches."""

    def __init__(self) -> None:
        super().__init__()
        self.watches = 0

    async def renewed(self) -> Caller:
        if self.watches == 9:
            raise Problem(401, "unauthenticated", "the cluster does not know this token")
        return self

    async def watch(self, *_: object) -> Any:
        self.watches += 1
        return TalkingWatch() if self.watches == 4 else EndedWatch()


class TalkingWatch(EndedWatch):
    """A watch with one change."""

    told = False

    async def __anext__(self) -> Change:
        if self.told:
            raise StopAsyncIteration
        self.told = True
        return Change("BOOKMARK", {"metadata": {"resourceVersion": "8"}})


def test_a_cluster_that_ends_every_watch_at_once_is_not_asked_without_rest() -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def story() -> None:
        caller = TalkingCaller()
        answer = await watched(caller, JOB, Selection("default"), "7", job_view, sleep=sleep)  # type: ignore[arg-type]
        parts = [bytes(part).decode() async for part in answer.body_iterator]  # type: ignore[arg-type]
        assert [part.split("\n")[0] for part in parts] == ["id: 7", "id: 8", "event: ERROR"]

    asyncio.run(story())
    assert pauses == [0.5, 1, 2, 0.5, 1, 2, 4, 8], "longer each time, anew after a change"
    assert pause_s(10**9) == 8


def line(step: int, loss: float = 2.5) -> str:
    """The line that the trainer's agent prints."""
    found = StepEvent(
        step=step, total_steps=100, loss=loss, learning_rate=3e-4, grad_norm=0.9, tokens=step * 512,
        tokens_per_s=12345.0, step_s=0.1, eta_s=130.0,
    )  # fmt: skip
    return step_line(found)


def test_the_history_of_a_run_covers_its_restarts(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(found.job(), phase="Running", progress={"step": 4, "totalSteps": 100})
        path = f"{JOBS}/run/metrics"
        empty = (await found.client.get(path)).json()
        assert (empty["points"], empty["complete"], "pods that logged them are gone" in empty["missing"]) == (
            [],
            False,
            True,
        )
        first = [line(1), line(2), "[rank 0] noise", line(3, 9.0)]
        found.pod(job, 0, "\n".join(first) + "\n", attempt=0, phase="Failed")
        found.pod(job, 0, "\n".join([line(3), "step 3  validation loss 2.2500", line(4)]) + "\n", attempt=1)
        found.pod(job, 1, line(77) + "\n", attempt=1)
        history = (await found.client.get(path)).json()
        assert [point["step"] for point in history["points"]] == [1, 2, 3, 4]
        assert history["points"][2] == {
            "step": 3,
            "loss": 2.5,
            "validation_loss": 2.25,
            "learning_rate": 3e-4,
            "gradient_norm": 0.9,
            "tokens_per_second": 12345.0,
        }
        assert (history["complete"], history["missing"], history["source"]) == (True, "", "logs")
        later = (await found.client.get(path, params={"after_step": 3})).json()
        assert [point["step"] for point in later["points"]] == [4]
        middle = (await found.client.get(path, params={"after_step": 1, "until_step": 3})).json()
        assert [point["step"] for point in middle["points"]] == [2, 3]

    tell(story)


@pytest.mark.parametrize(
    ("query", "field", "words"),
    [
        ({"attempt": 1, "from_attempt": 1}, "query.from_attempt", "exclude each other"),
        ({"since_time": "0001-01-01T00:00:00+23:00"}, "query.since_time", "must be between 1970 and 9000"),
        ({"since_time": "yesterday"}, "query.since_time", "got 'yesterday'"),
    ],
    ids=["both", "ancient", "no time"],
)
def test_a_log_that_cannot_be_asked_for_is_refused(tell: Tell, query: dict[str, Any], field: str, words: str) -> None:
    async def story(found: World) -> None:
        found.job()
        refused = await found.client.get(f"{JOBS}/run/logs", params=query)
        (error,) = refused.json()["errors"]
        assert (refused.status_code, error["field"], words in error["message"]) == (422, field, True), error

    tell(story)


def test_lines_are_merged_by_time_and_stay_in_their_pods_order() -> None:
    a = [log_line("a", text) for text in ("2026-01-01T00:00:01.5Z one", "no time", "2026-01-01T00:00:03Z three")]
    b = [log_line("b", text) for text in ("2026-01-01T00:00:01.25Z zero", "2026-01-01T00:00:02.000000001Z two")]

    async def story() -> list[str]:
        return [found.text async for found in merged([one_by_one(a), one_by_one(b), one_by_one([])])]

    assert asyncio.run(story()) == ["zero", "one", "no time", "two", "three"]
    assert a[0] == LogLine("2026-01-01T00:00:01.5Z", "a", "one", 1_767_225_601_500_000_000)
    assert log_line("a", "2026-01-01T00:00:01Z").text == ""


async def one_by_one(lines: Iterable[LogLine]) -> AsyncIterator[LogLine]:
    for line in lines:
        yield line


def test_merged_logs_are_read_as_they_are_sent() -> None:
    """However long the logs are: one line of each pod is in memory."""
    num_read = 0

    def endless(pod: str) -> Iterator[LogLine]:
        nonlocal num_read
        for second in itertools.count():
            num_read += 1
            yield LogLine("", pod, str(second), second * 10**9 + 1)

    async def story() -> list[str]:
        lines = merged([one_by_one(endless("a")), one_by_one(endless("b"))])
        return [(await anext(lines)).text for _ in range(6)]

    assert asyncio.run(story()) == ["0", "0", "1", "1", "2", "2"]
    assert num_read == 7, "the six, and the next of the pod whose turn has come"


def test_a_log_that_may_not_be_read_is_told_before_any_line() -> None:
    async def refused() -> AsyncIterator[LogLine]:
        raise ApiError(403, "Forbidden", "no")
        yield LogLine("", "", "")

    async def story() -> None:
        lines = merged([one_by_one([LogLine("", "a", "one")]), refused()])
        with pytest.raises(ApiError, match="no"):
            await anext(lines)

    asyncio.run(story())


def test_metrics_that_are_no_numbers_are_left_out() -> None:
    json_line = '{"kind": "step", "step": 3, "loss": NaN, "learning_rate": 0.5, "grad_norm": 1.0, "tokens_per_s": 2.0}'
    (first, second) = metric_samples([line(2, float("nan")), json_line, '{"kind": "step"', "step into the light"])
    assert (first.step, first.values.get("loss"), first.values["gradient_norm"]) == (2, None, 0.9)
    assert (second.step, second.values.get("loss"), second.values["learning_rate"]) == (3, None, 0.5)


def test_a_silent_stream_shows_that_it_is_alive() -> None:
    async def silent() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.sleep(0.2)
        yield b"two"

    async def story() -> None:
        seen = [part async for part in with_heartbeat(silent(), 0.02)]
        assert (seen[0], seen[-1]) == (b"one", b"two")
        assert set(seen[1:-1]) == {b": alive\n\n"}

    asyncio.run(story())


def test_a_client_that_leaves_ends_the_watch_behind_it(tell: Tell) -> None:
    async def story(found: World) -> None:
        found.job("one")
        for _ in range(3):
            async with found.client.stream("GET", JOBS, params={"watch": True}) as answer:
                await take(events(answer), 2)
                assert watches(found)
        async with asyncio.timeout(60):
            while watches(found):
                await asyncio.sleep(0.02)

    tell(story, sockets=True)


def watches(found: World) -> list[str]:
    """The connections between the gateway and the cluster with an answer that goes on."""
    pool = found.access.streams._transport._pool  # type: ignore[attr-defined]
    return [info for line in pool.connections if "ACTIVE" in (info := line.info())]
