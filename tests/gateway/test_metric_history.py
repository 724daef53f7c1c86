"""The history of a run's metrics is read from its log: by the agent while it runs, by a task after its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from stoker.gateway.config import GatewayConfig
from stoker.gateway.domain.metric_task import Span, task_of
from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.cluster.local.pod_address import host_of
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.settings import Settings
from stoker.operator.render.trainer import pin
from stoker.pod.metric_reader import history_lines, read_history
from stoker.pod.serve import Server, bind_tcp
from stoker.trainer.agent.history import history_route
from testing.gateway.world import World, world

Tell = Callable[..., None]
METRICS = "/v1/training/jobs/run/metrics"


def write_log(file: Path, steps: int, *, first: int = 1) -> Path:
    """A log with one spike, at step 777."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as stream:
        for step in range(first, first + steps):
            loss = 99.0 if step == 777 else 2.0 + 1.0 / step
            fields = {"step": step, "loss": loss, "learning_rate": 1e-3, "grad_norm": 0.5, "tokens_per_s": 100.0}
            stream.write(json.dumps({"kind": "step", **fields}) + "\n")
    return file


def pinned(found: World, **spec: Any) -> Object:
    """A job with the rendering that the operator pins, at step 2000."""
    job = found.job(**spec)
    pinned = pin(TrainingJob.model_validate(job), None, Settings())
    progress = {"step": 2000, "totalSteps": 3000}
    return found.put_status(job, phase="Running", pinned=pinned.to_wire(), progress=progress)


def log_of(job: Object) -> str:
    return str(job["status"]["pinned"]["rendered"]["config"]["logging"]["jsonl"])


def test_the_agent_serves_the_log_while_the_job_runs(tell: Tell, tmp_path: Path) -> None:
    file = write_log(tmp_path / "log.jsonl", 2000)

    async def story(found: World) -> None:
        job = pinned(found)
        pod = found.pod(job, 0, "nothing about steps\n", attempt=1)
        port = job["status"]["pinned"]["rendered"]["config"]["listen"]["port"]
        server = Server(Starlette(routes=[history_route(str(file))]), bind_tcp("127.0.0.1", 0))
        await server.start()
        try:
            found.addresses.served[host_of(pod), port] = server.port
            whole = (await found.client.get(METRICS)).json()
            assert (whole["source"], whole["complete"], len(whole["points"])) == ("agent", True, 2000)
            assert whole["points"][776] == {
                "step": 777, "loss": 99.0, "validation_loss": None, "learning_rate": 1e-3, "gradient_norm": 0.5,
                "tokens_per_second": 100.0,
            }  # fmt: skip
            few = (await found.client.get(METRICS, params={"max_points": 50})).json()
            steps = [point["step"] for point in few["points"]]
            assert len(steps) <= 50
            assert {1, 777, 2000} <= set(steps)
            part = (await found.client.get(METRICS, params={"after_step": 10, "until_step": 12})).json()
            assert [point["step"] for point in part["points"]] == [11, 12]
            file.write_text("")
            gone = (await found.client.get(METRICS)).json()
            assert (gone["complete"], gone["points"]) == (False, [])
            assert gone["missing"] == "steps 1 to 2000: the run began at a checkpoint, or its log was removed"
            file.unlink()
            silent = (await found.client.get(METRICS)).json()
            assert silent["source"] == "logs"
            assert "no step was logged" in silent["missing"]
        finally:
            await server.stop(1.0)

    tell(story, sockets=True)


def test_a_task_reads_the_log_of_a_job_that_has_ended(tell: Tell, tmp_path: Path) -> None:
    file = write_log(tmp_path / "log.jsonl", 2000)

    async def story(found: World) -> None:
        job = found.put_status(pinned(found), phase="Completed")
        kubelet = asyncio.create_task(_run_the_task(found, job, file))
        answer = (await found.client.get(METRICS)).json()
        await kubelet
        assert (answer["source"], answer["complete"], answer["missing"], len(answer["points"])) == (
            "task",
            True,
            "",
            2000,
        )
        again = (await found.client.get(METRICS, params={"max_points": 20})).json()
        assert again["source"] == "task"
        assert 777 in [point["step"] for point in again["points"]]
        assert len(found.objects.of_kind("Pod")) == 1

    tell(story, config=GatewayConfig(metrics_task_wait_s=60))


async def _run_the_task(found: World, job: Object, file: Path) -> None:
    """What a kubelet does with the pod that appears."""
    task = task_of(job, Span())
    assert task is not None
    key = Key("Pod", "default", task["metadata"]["name"])
    while (pod := found.objects.find(key)) is None:
        await asyncio.sleep(0.01)
    assert pod["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    log = found.folders.log("default", key.name)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("\n".join(history_lines(read_history(file))) + "\n")
    found.put_status(pod, phase="Succeeded")


def test_what_keeps_a_task_from_reading_is_told(tell: Tell) -> None:
    async def story(found: World) -> None:
        job = found.put_status(pinned(found), phase="Completed")
        found.pod(job, 0, "step 1999/3000  loss 2.5000  lr 3.0e-04  norm 0.90  310 tokens/s\n", phase="Succeeded")
        waiting = (await found.client.get(METRICS)).json()
        assert (waiting["source"], waiting["complete"], [p["step"] for p in waiting["points"]]) == (
            "logs",
            False,
            [1999],
        )
        assert waiting["missing"].startswith("steps 1 to 1998: ")
        assert "still reads the log of metrics (Pending): ask again" in waiting["missing"]
        (task,) = (pod for pod in found.objects.of_kind("Pod") if "-metrics-" in pod["metadata"]["name"])
        message = '{"cause": "TaskFailed", "detail": "log.jsonl: No such file or directory"}'
        ended = [{"name": "main", "state": {"terminated": {"exitCode": 76, "message": message}}}]
        found.put_status(task, phase="Failed", containerStatuses=ended)
        failed = (await found.client.get(METRICS)).json()
        assert "failed: log.jsonl: No such file or directory" in failed["missing"]
        assert found.objects.find(Key("Pod", "default", task["metadata"]["name"])) is None

    tell(story, config=GatewayConfig(metrics_task_wait_s=0))


@pytest.mark.parametrize(
    ("asked", "missing"),
    [({"after_step": 2000}, ""), ({"after_step": 1990}, "1991 to 1998"), ({"until_step": 50}, "1 to 50")],
)
def test_only_steps_that_were_asked_for_and_reached_can_be_missing(
    tmp_path: Path, asked: dict[str, int], missing: str
) -> None:
    async def story() -> None:
        async with world("kubernetes", tmp_path) as found:
            job = found.put_status(pinned(found), phase="Running")
            found.pod(job, 0, "step 1999/3000  loss 2.5000  lr 3.0e-04  norm 0.90  310 tokens/s\n")
            answer = (await found.client.get(METRICS, params=asked)).json()
            assert answer["complete"] == (not missing)
            assert (answer["missing"] or "").partition(":")[0] == (missing and f"steps {missing}")

    asyncio.run(story())


def test_a_caller_without_the_right_to_make_pods_is_told(tmp_path: Path) -> None:
    async def story() -> None:
        async with world("kubernetes", tmp_path) as found:
            found.put_status(pinned(found), phase="Completed")
            answer = await found.client.get(METRICS, headers={"Authorization": "Bearer viewer"})
            assert answer.status_code == 200
            assert 'pods is forbidden: User "viewer" cannot create' in answer.json()["missing"]

    asyncio.run(story())


def rendered(**spec: Any) -> dict[str, Any]:
    """A finished job with its pinned rendering, without a cluster."""
    metadata = {
        "name": "run",
        "namespace": "default",
        "uid": "0123456789abcdef",
        "resourceVersion": "1",
        "generation": 1,
    }
    from testing.gateway.world import JOB_SPEC

    body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata}
    body["spec"] = {**JOB_SPEC, **spec}
    found = pin(TrainingJob.model_validate(body), None, Settings(image_pull_secrets=("pull",)))
    return {**body, "status": {"phase": "Completed", "pinned": found.to_wire()}}


def test_the_task_has_the_claims_of_the_job_and_nothing_else_of_it() -> None:
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    workers = {"gpusPerPod": 8, "env": [secret], "nodeSelector": {"pool": "gpu"}, "image": "own/trainer:1"}
    job = rendered(workers=workers)
    assert log_of(job) == "/var/stoker/checkpoints/run/logs/run-01234567.jsonl"
    task = task_of(job, Span(5, 9))
    assert task is not None
    (container,) = task["spec"]["containers"]
    assert container["command"][:4] == ["python", "-m", "stoker.pod.metric_reader", log_of(job)]
    assert container["command"][4:8] == ["--after-step", "5", "--until-step", "9"]
    assert container["image"] == "own/trainer:1"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert task["spec"]["securityContext"]["runAsNonRoot"] is True
    assert (task["spec"]["nodeSelector"], task["spec"]["imagePullSecrets"]) == ({"pool": "gpu"}, [{"name": "pull"}])
    assert [volume["persistentVolumeClaim"] for volume in task["spec"]["volumes"]] == [
        {"claimName": "claim", "readOnly": True}
    ]
    assert [(mount["mountPath"], mount["readOnly"]) for mount in container["volumeMounts"]] == [
        ("/var/stoker/checkpoints", True)
    ]
    assert "env" not in container
    assert "nvidia.com/gpu" not in json.dumps(task)
    assert task["metadata"]["name"] != task_of(job, Span())["metadata"]["name"]  # type: ignore[index]
    assert len(task["metadata"]["name"]) <= 63


def test_a_log_that_is_on_no_claim_has_no_task() -> None:
    assert task_of(rendered(logging={"jsonl": "/not-mounted/log.jsonl"}), Span()) is None
    assert task_of({"metadata": {"name": "old"}, "status": {}}, Span()) is None


@pytest.mark.parametrize(
    ("query", "status", "word"),
    [
        ({"after_step": "x"}, 400, "after_step: a whole number from 0 to"),
        ({"max_points": "3"}, 400, "max_points: a whole number from 12 to 20000 is needed, got '3'"),
        ({"until_step": "²"}, 400, "until_step"),
        ({}, 404, "logging.jsonl is not set"),
    ],
)
def test_the_agent_names_what_is_wrong(query: dict[str, str], status: int, word: str) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Starlette(routes=[history_route(None)]))
        async with httpx.AsyncClient(transport=transport, base_url="http://agent") as client:
            return await client.get("/metrics/history", params=query)

    answer = asyncio.run(ask())
    assert answer.status_code == status
    assert word in answer.json()["error"]
