"""The Python client against a gateway on a real port: the examples of its page, retries, waiting, both flavours."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from stoker.client.async_client import AsyncStokerClient
from stoker.client.client import StokerClient
from stoker.client.errors import (
    Conflict,
    Forbidden,
    GatewayFailed,
    InvalidRequest,
    JobFailed,
    NoAnswer,
    NotAuthenticated,
    NotFound,
    StokerError,
)
from stoker.client.waiting import Wait, is_settled
from stoker.operator.domain.plan import Key
from testing.gateway.kube_server import KubeServer, kube_server
from testing.gateway.world import JOB_SPEC, KEY

PAGE = Path(__file__).parents[2] / "docs" / "sdk.md"
END = {"step": 100, "totalSteps": 100}
LINE = "step {step}/100  loss 2.5000  lr 3.0e-04  norm 0.90  310 tokens/s  ETA 2m10s\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeServer]:
    with kube_server(tmp_path_factory.mktemp("kube")) as found:
        yield found


@pytest.fixture
def url(server: KubeServer) -> str:
    return str(server.world.client.base_url)


def client_of(url: str, **options: Any) -> StokerClient:
    return StokerClient(url, KEY, sleep=lambda _: time.sleep(0.01), **options)


def test_the_examples_of_the_page_run(
    server: KubeServer, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after the other, as a reader would, with an operator that completes every job at its checkpoint."""
    monkeypatch.setenv("STOKER_GATEWAY", url)
    monkeypatch.setenv("STOKER_TOKEN", KEY)
    done = threading.Event()

    def operate() -> None:
        while not done.is_set():
            for job in server.do(lambda found: found.objects.of_kind("TrainingJob")):
                if "status" not in job and job["spec"].get("model"):
                    server.do(lambda found, job=job: found.checkpoint(job, 100))  # type: ignore[misc]
                    server.do(lambda found, job=job: found.pod(job, 0, LINE.format(step=1), phase="Succeeded"))  # type: ignore[misc]
                    server.do(lambda found, job=job: found.put_status(job, phase="Completed", progress=END))  # type: ignore[misc]
            time.sleep(0.05)

    operator = threading.Thread(target=operate)
    operator.start()
    names: dict[str, Any] = {}
    try:
        for example in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
            exec(compile(example, str(PAGE), "exec"), names)
    finally:
        done.set()
        operator.join()
        if "client" in names:
            names["client"].close()
    out = capsys.readouterr().out
    assert "COMPLETED 100" in out
    assert LINE.format(step=1).strip() in out
    assert "100 COMPLETE True" in out
    assert "422 [" in out
    assert 'optimization_config.optimizer: Unsupported value: "sgd"' in out
    assert names["losses"] == [(1, 2.5)]
    assert names["longer"].job_id != names["job"].job_id


def test_a_job_that_fails_or_takes_too_long_is_an_error(server: KubeServer, url: str) -> None:
    job = server.do(lambda found: found.job("failing"))
    with client_of(url) as client:
        with pytest.raises(TimeoutError, match="job failing is still PENDING after 0 s"):
            client.wait("failing", timeout_s=0, progress=False)
        server.do(lambda found: found.put_status(job, phase="Failed", message="OutOfMemory on rank 3"))
        with pytest.raises(JobFailed, match="job failing is FAILED: OutOfMemory on rank 3") as failed:
            client.wait(job["metadata"]["uid"])
        assert failed.value.job.job_name == "failing"
        server.do(lambda found: found.put_status(job, phase="Running"))
        client.suspend("failing")
        server.do(lambda found: found.put_status(job, phase="Suspended"))
        assert client.wait("failing").status == "SUSPENDED"


@pytest.mark.parametrize(("change", "end"), [("resume", "Completed"), ("cancel", "Cancelled")])
def test_a_wait_goes_on_for_a_job_that_leaves_its_suspension_only_now(
    server: KubeServer, url: str, change: str, end: str
) -> None:
    """The answer of resume or cancel comes before the operator has seen it: the job still reads as suspended."""
    name = f"late-{change}"
    job = server.do(lambda found: found.put_status(found.job(name), phase="Running"))
    with client_of(url) as client:
        client.suspend(name)
        server.do(lambda found: found.put_status(job, phase="Suspended"))
        getattr(client, change)(name)
        assert client.job(name).status == "SUSPENDED"
        with pytest.raises(TimeoutError, match="is still SUSPENDED"):
            client.wait(name, timeout_s=0, progress=False)
        server.do(lambda found: found.put_status(job, phase=end))
        assert is_settled(client.job(name))


def test_a_wait_bears_a_gateway_that_restarts_and_no_longer_silence(server: KubeServer, url: str) -> None:
    server.do(lambda found: found.job("bearing"))
    with client_of(url) as client:
        job = client.job("bearing").model_dump(mode="json", by_alias=True)
    running, done = ({**job, "status": status} for status in ("RUNNING", "COMPLETED"))
    silence = [httpx.ConnectError("refused")] * 9 + [httpx.Response(503)] * 4
    flaky = Flaky(httpx.Response(200, json=running), *silence, httpx.Response(200, json=done))
    with client_of("http://gateway", transport=httpx.MockTransport(flaky)) as client:
        assert client.wait("run", progress=False).status == "COMPLETED"

    clock = [0.0]
    wait, error = Wait(None, lambda: clock[0]), NoAnswer("silent")
    wait.missed(error)
    clock[0] = 300.0
    with pytest.raises(NoAnswer, match="silent"):
        wait.missed(error)
    assert Wait(1.5, lambda: clock[0]).pause_s == 1.5, "the last look is at the end of the time"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, NotAuthenticated),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (422, InvalidRequest),
        (500, GatewayFailed),
        (418, StokerError),
    ],
)
def test_a_refusal_has_the_type_of_its_status(status: int, kind: type[StokerError]) -> None:
    flaky = Flaky(httpx.Response(status, text="no"))
    with client_of("http://gateway", transport=httpx.MockTransport(flaky)) as client, pytest.raises(StokerError) as got:
        client.job("run")
    assert (type(got.value), got.value.status) == (kind, status)


def test_lists_go_over_all_pages(server: KubeServer, url: str) -> None:
    for number in range(3):
        server.do(lambda found, n=number: found.put_status(found.job(f"page-{n}", "team-a"), phase="Running"))  # type: ignore[misc]

    def pages(request: httpx.Request) -> httpx.Response:
        """Ask the gateway for pages of one."""
        small = request.url.copy_merge_params({"limit": 1})
        return httpx.get(small, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)

    with client_of(url, namespace="team-a", transport=httpx.MockTransport(pages)) as client:
        assert [job.job_name for job in client.jobs("RUNNING")] == ["page-0", "page-1", "page-2"]
        assert list(client.jobs("FAILED")) == []
        job = server.do(lambda found: found.job("saved", "team-a"))
        server.do(lambda found: [found.checkpoint(job, step) for step in (10, 20, 30)])
        assert [one.step for one in client.checkpoints("saved")] == [30, 20, 10]
        assert sorted(one.step or 0 for one in client.checkpoints()) == [10, 20, 30]
        assert list(client.deployments()) == []


def test_both_clients_have_the_same_methods() -> None:
    def methods(found: type) -> dict[str, list[str]]:
        public = inspect.getmembers(found, inspect.isfunction)
        return {name: list(inspect.signature(one).parameters) for name, one in public if not name.startswith("_")}

    assert methods(StokerClient) == methods(AsyncStokerClient)


def test_the_async_client_gets_the_same_answers(server: KubeServer, url: str) -> None:
    job = server.do(lambda found: found.put_status(found.job("async"), phase="Running"))
    server.do(lambda found: found.pod(job, 0, LINE.format(step=1), phase="Succeeded"))

    async def story() -> list[object]:
        async with AsyncStokerClient(url, KEY) as client:
            saved = await client.save("async")
            server.do(lambda found: found.put_status(job, phase="Completed"))
            return [
                await client.job("async"),
                [line async for line in client.logs("async", follow=True)],
                await client.metrics("async"),
                await client.checkpoint(saved.checkpoint_id),
                [one async for one in client.checkpoints("async")],
                await client.cluster(),
                await client.nodes(),
            ]

    answers = asyncio.run(story())
    with client_of(url) as client:
        (saved,) = client.checkpoints("async")
        assert answers == [
            client.job("async"),
            list(client.logs("async")),
            client.metrics("async"),
            client.checkpoint(saved.checkpoint_id),
            [saved],
            client.cluster(),
            client.nodes(),
        ]


def test_a_cancelled_task_ends_its_wait_and_not_the_job(server: KubeServer, url: str) -> None:
    server.do(lambda found: found.put_status(found.job("cancelled-wait"), phase="Running"))

    async def story() -> str:
        looked = asyncio.Event()

        async def sleep(_: float) -> None:
            looked.set()
            await asyncio.Event().wait()

        async with AsyncStokerClient(url, KEY, sleep=sleep) as client:
            waiting = asyncio.create_task(client.wait("cancelled-wait", progress=False))
            await looked.wait()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            return (await client.job("cancelled-wait")).status

    assert asyncio.run(story()) == "RUNNING"
    found = server.do(lambda found: found.objects.get(Key("TrainingJob", "default", "cancelled-wait")))
    assert not (found["spec"].get("run") or {}).get("cancel"), "the job was left alone"


class Flaky:
    """A gateway that answers with these, one after the other."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.keys: list[str | None] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.keys.append(request.headers.get("Idempotency-Key"))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


GOOD = httpx.Response(
    202, json={"checkpoint_id": "u", "checkpoint_name": "c", "status": "SAVING"}
)  # fmt: skip
JOB = {"job_id": "u", "job_name": "run", "namespace": "default", "status": "PENDING"}


def test_a_repeated_request_carries_the_same_key() -> None:
    flaky = Flaky(
        httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(429, headers={"Retry-After": "7"}), GOOD
    )
    pauses: list[float] = []
    with StokerClient("http://gateway", KEY, transport=httpx.MockTransport(flaky), sleep=pauses.append) as client:
        assert client.save("run").checkpoint_name == "c"
    assert len(set(flaky.keys)) == 1
    assert None not in flaky.keys
    assert pauses == [0.5, 1.0, 7.0]


def test_an_id_is_one_segment_of_the_path_whatever_it_contains() -> None:
    """An id that comes from a user reaches no other route and adds nothing to the query."""
    seen: list[tuple[str, bytes]] = []

    def note(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.raw_path))
        return httpx.Response(404, json={})

    with client_of("http://gateway", transport=httpx.MockTransport(note)) as client:
        for ask in (client.job, client.cancel, client.suspend, client.checkpoint, client.deployment):
            with pytest.raises(NotFound):
                ask("../x?purge=true#y")
            for nothing in ("", ".", ".."):
                with pytest.raises(ValueError, match="is no UUID and no name"):
                    ask(nothing)
    inside = b"..%2Fx%3Fpurge%3Dtrue%23y"
    jobs = b"/v1/training/jobs/" + inside
    assert seen == [
        ("GET", jobs), ("DELETE", jobs), ("POST", jobs + b"/suspend"), ("GET", b"/v1/checkpoints/" + inside),
        ("GET", b"/v1/deployments/" + inside),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(200, html="<html>"), r"\(200, text/html; charset=utf-8\) is not a gateway's"),
        (httpx.Response(200, json={"job": "u"}), r"\(200, application/json\) is not a gateway's"),
        (httpx.Response(307, headers={"Location": "https://login/"}), r"\(307, https://login/\) is not a gateway's"),
    ],
    ids=["page", "other JSON", "redirect"],
)
def test_what_answers_in_place_of_a_gateway_is_no_answer(answer: httpx.Response, words: str) -> None:
    transport = httpx.MockTransport(lambda _: answer)
    with client_of("http://gateway", transport=transport) as client:
        with pytest.raises(NoAnswer, match=words):
            client.job("run")
        with pytest.raises(NoAnswer, match=words):
            next(client.checkpoints("run"))
        for stream in (client.logs("run", follow=True), client.watch()):
            with pytest.raises(NoAnswer, match=words):
                next(stream)
        if answer.status_code == 307:
            with pytest.raises(NoAnswer, match=words):
                next(client.logs("run"))


def test_a_job_that_is_wrong_before_it_is_sent_is_refused_as_the_gateway_would() -> None:
    with client_of("http://gateway") as client, pytest.raises(InvalidRequest) as refused:
        client.submit({"job_name": "Run", "model_config": {"num_layers": 0}, "more": 1})
    assert {one.field for one in refused.value.fields} == {"job_name", "model_config.num_layers", "more"}
    assert refused.value.status == 422


def test_a_token_as_a_file_holds_it_is_good() -> None:
    seen: list[str] = []

    def note(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Authorization"])
        return httpx.Response(404, json={})

    client = StokerClient("http://gateway", f"{KEY}\n", transport=httpx.MockTransport(note))
    with client, pytest.raises(NotFound):
        client.job("run")
    assert seen == [f"Bearer {KEY}"]


def test_what_may_not_be_repeated_is_sent_once() -> None:
    job = {"job_name": "run", "spec": dict(JOB_SPEC)}
    flaky = Flaky(httpx.ReadError("cut"), httpx.Response(429), httpx.Response(201, json=JOB), httpx.Response(503))
    with client_of("http://gateway", transport=httpx.MockTransport(flaky)) as client:
        with pytest.raises(NoAnswer, match="cut"):
            client.submit(job)
        assert client.submit(job).job_id == "u", "a 429 did nothing"
        with pytest.raises(StokerError) as refused:
            client.cancel("run", purge=True)
        assert refused.value.status == 503
    assert flaky.answers == []


def test_it_gives_up_after_four_tries() -> None:
    flaky = Flaky(*[httpx.ConnectError("refused")] * 9)
    with client_of("http://gateway", transport=httpx.MockTransport(flaky)) as client, pytest.raises(NoAnswer):
        client.job("run")
    assert len(flaky.keys) == 4


def test_a_deployment_gives_an_openai_client(server: KubeServer, url: str) -> None:
    found: dict[str, Any] = {
        "deployment_id": "u", "deployment_name": "chat", "namespace": "default", "phase": "Pending", "message": "",
        "ready": None, "endpoint": None, "checkpoint": None, "created_at": "", "resource_version": "1", "spec": {},
    }  # fmt: skip
    answers = [found, {**found, "endpoint": "http://chat.default.svc:8000"}]
    flaky = Flaky(*(httpx.Response(200, json=one) for one in answers))
    with client_of("http://gateway", transport=httpx.MockTransport(flaky)) as client:
        with pytest.raises(ValueError, match="deployment chat is Pending and has no endpoint yet"):
            client.openai("chat")
        made = client.openai("chat")
    assert isinstance(made, openai.OpenAI)
    assert str(made.base_url) == "http://chat.default.svc:8000/v1/"
