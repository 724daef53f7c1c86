"""Sample data for the console: jobs in every state, checkpoints, a deployment with fake programs behind it."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from stoker.operator.cluster.local.addresses import Host
from stoker.operator.domain.plan import Object
from stoker.pod.gpu_metrics import GpuMetrics
from stoker.pod.gpu_reading import GpuReader
from stoker.pod.http import probe_routes
from stoker.pod.serve import Server, bind_tcp
from testing.gateway.world import JOB_SPEC, World
from testing.pod.nvml import FakeNvml

ENGINE_PORT = 8000
AGENT_PORT = 8080
DRIVER_WAIT_S = 30.0
"""Longest wait for a driver's thread: below the gateway's for an agent, and long for a busy machine."""
API_KEY = "sk-locked"
"""Key that a chat about 'locked' needs."""
METRICS = {
    "router": """# TYPE stoker_router_requests_total counter
stoker_router_requests_total{{code="200"}} {n}
stoker_router_requests_total{{code="500"}} 1
# TYPE stoker_router_first_byte_seconds histogram
stoker_router_first_byte_seconds_bucket{{le="0.05"}} {half}
stoker_router_first_byte_seconds_bucket{{le="0.25"}} {n}
stoker_router_first_byte_seconds_bucket{{le="+Inf"}} {n}
stoker_router_held_requests 2
stoker_router_pending_requests{{backend="a"}} 3
stoker_router_ready_backends 2
""",
    "engine": """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 5
vllm:num_requests_waiting 1
vllm:kv_cache_usage_perc 0.42
vllm:time_to_first_token_seconds_bucket{{le="0.1"}} {half}
vllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {n}
""",
}


@dataclass
class Programs:
    """A fake router and fake engines at the addresses of a deployment."""

    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of chat requests."""
    scrapes: int = 0
    held: asyncio.Event = field(default_factory=asyncio.Event)
    """Until it is set, an answer about 'slow' has its first word alone."""

    def app(self, program: str) -> Starlette:
        async def metrics(_: Request) -> Response:
            self.scrapes += 1
            n = 100 + 40 * self.scrapes
            return PlainTextResponse(METRICS[program].format(n=n, half=n // 2))

        async def chat(request: Request) -> Response:
            body = await request.json()
            self.asked.append(body)
            if "locked" in str(body.get("messages")) and request.headers.get("x-api-key") != API_KEY:
                return JSONResponse({"error": {"message": "The API key is missing or wrong"}}, 401)
            if body.get("model") == "unknown":
                return JSONResponse({"error": {"message": "model: 'unknown' is not served"}}, 404)
            if body.get("model") == "late":
                return JSONResponse({"error": {"message": "No engine is ready"}}, 503)
            words = ["You ", "asked: ", body["messages"][-1]["content"]]
            if not body.get("stream"):
                return JSONResponse({"choices": [{"message": {"role": "assistant", "content": "".join(words)}}]})
            held = self.held if "slow" in words[-1] else None
            return StreamingResponse(_streamed(words, held), media_type="text/event-stream")

        return Starlette(
            routes=[Route("/metrics", metrics), Route("/v1/chat/completions", chat, methods=["POST"])],
        )


async def _streamed(words: list[str], held: asyncio.Event | None) -> AsyncIterator[bytes]:
    for thought in ("Let me ", "think"):
        yield f"data: {json.dumps({'choices': [{'delta': {'reasoning': thought}}]})}\n\n".encode()
    for word in words:
        yield f"data: {json.dumps({'choices': [{'delta': {'content': word}}]})}\n\n".encode()
        if held is not None:
            await held.wait()
    yield b"data: [DONE]\n\n"


@asynccontextmanager
async def programs(found: World, name: str = "chat", engines: int = 2) -> AsyncIterator[Programs]:
    """Serve what a deployment's Service and engines' pods serve; needs a world with `sockets`."""
    made = Programs()
    async with AsyncExitStack() as stack:
        places = [(Host("service", "default", name), 80, "router")]
        places += [(Host("pod", "default", f"{name}-main-{n}"), ENGINE_PORT, "engine") for n in range(engines)]
        for host, port, program in places:
            server = Server(made.app(program), bind_tcp("127.0.0.1", 0))
            await server.start()
            found.addresses.served[host, port] = server.port
            stack.push_async_callback(server.stop, 1.0)
        yield made


@asynccontextmanager
async def routers(found: World, of: Object, made: Programs, count: int) -> AsyncIterator[None]:
    """Serve what the pods of a deployment's routers serve; needs a world with `sockets`."""
    metadata = of["metadata"]
    labels = {"stoker.dev/role": "router", "stoker.dev/deployment-uid": metadata["uid"]}
    container = {"name": "main", "command": ["true"], "ports": [{"name": "http", "containerPort": AGENT_PORT}]}
    async with AsyncExitStack() as stack:
        for name in (f"{metadata['name']}-router-{number}" for number in range(count)):
            place = {"name": name, "namespace": metadata["namespace"], "labels": labels}
            spec = {"restartPolicy": "Never", "containers": [container]}
            pod = found.objects.create({"apiVersion": "v1", "kind": "Pod", "metadata": place, "spec": spec})
            found.put_status(pod, phase="Running")
            server = Server(made.app("router"), bind_tcp("127.0.0.1", 0))
            await server.start()
            found.addresses.served[Host("pod", metadata["namespace"], name), AGENT_PORT] = server.port
            stack.push_async_callback(server.stop, 1.0)
        found.put_status(of, router={"replicas": count, "ready": count})
        yield


@asynccontextmanager
async def gpu_agent(found: World, pod: Object, driver: FakeNvml) -> AsyncIterator[None]:
    """Serve the metrics of a pod's GPUs, as its agent does; needs a world with `sockets`."""
    registry = CollectorRegistry()
    registry.register(GpuMetrics(GpuReader(lambda: driver, None).read, DRIVER_WAIT_S))
    routes = probe_routes(alive=lambda: True, ready=lambda: True, status=dict, registry=registry)
    server = Server(Starlette(routes=routes), bind_tcp("127.0.0.1", 0))
    await server.start()
    metadata = pod["metadata"]
    found.addresses.served[Host("pod", metadata["namespace"], metadata["name"]), AGENT_PORT] = server.port
    try:
        yield
    finally:
        await server.stop(1.0)


def step_lines(steps: int, *, first: int = 1, seed: int = 7) -> str:
    """The log of a run whose loss falls, with validation."""
    draw = random.Random(seed)
    lines = []
    for step in range(first, first + steps):
        loss = 2.1 + 8.4 * math.exp(-step / 260) + draw.gauss(0, 0.05)
        rate = 3e-4 * min(1.0, step / 100) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, step / 3000)))
        norm, speed = 0.8 + 2.5 * math.exp(-step / 90) + abs(draw.gauss(0, 0.12)), 41000 + draw.gauss(0, 700)
        lines.append(
            f"step {step}/3000  loss {loss:.4f}  lr {rate:.1e}  norm {norm:.2f}  {speed:,.0f} tokens/s  ETA 9m10s"
        )
        if step % 200 == 0:
            lines.append(f"step {step}  validation loss {loss + 0.12:.4f}")
    return "\n".join(lines) + "\n"


def time_at(start: datetime, minutes: float) -> str:
    return f"{start + timedelta(minutes=minutes):%Y-%m-%dT%H:%M:%SZ}"


def running_job(found: World, start: datetime, *, steps: int = 1200) -> Object:
    """A job in its second attempt on two nodes, with its history, checkpoints and pods."""
    failure = {
        "cause": "OutOfMemory", "exitCode": 137, "node": "gpu-node-3", "rank": 5, "step": 430, "pod": "teach-a0-1",
        "detail": "the container used more than its memory", "at": time_at(start, 14), "action": "Retry",
    }  # fmt: skip
    resumed = {"name": "teach-400", "folder": "step-00000400.0a1b2c3d", "step": 400, "digest": "blake3:" + "0" * 64}
    job = found.job("teach", workers={"replicas": 2, "ranksPerPod": 4}, parallelism={"tensor": 2})
    for step in (200, 400, 420, 600, 800, 1000, 1200):
        good, times = (
            step != 420,
            {"savedAt": time_at(start, step / 22), "loss": f"{2.1 + 8.4 * math.exp(-step / 260):.3f}"},
        )
        saved = found.checkpoint(job, step, verified=good)
        _of_attempt(found, saved, job, int(step > 430), phase="Complete" if good else "Corrupt", **times)
    found.pod(job, 0, step_lines(430), attempt=0, phase="Failed", node="gpu-node-2")
    for rank, node in enumerate(("gpu-node-1", "gpu-node-4")):
        log = step_lines(steps - 400, first=401) if rank == 0 else ""
        pod = found.pod(job, rank, log, attempt=1, gpus=4, node=node)
        ready = {"type": "Ready", "status": "True", "reason": "Ready", "lastTransitionTime": time_at(start, 18)}
        found.put_status(pod, conditions=[ready])
    first = {"number": 0, "phase": "Failed", "startedAt": time_at(start, 1), "endedAt": time_at(start, 14)}
    second = {"number": 1, "phase": "Running", "startedAt": time_at(start, 16), "firstStep": 401}
    return found.put_status(
        job, phase="Running", startedAt=time_at(start, 1), restarts=1, lostSteps=30, worldSize=8, dataParallel=4,
        attempt={**second, "lastStep": steps, "resumedFrom": {**resumed, "verified": True},
                 "startup": {"firstStep": 6, "load": 25, "pull": 26, "queue": 0, "schedule": 4, "start": 11,
                             "rendezvous": 4, "compile": 8}},
        attempts=[{**first, "firstStep": 1, "lastStep": 430, "failure": failure}],
        goodput={
            "since": time_at(start, 50), "state": "productive", "productive": 2460, "checkpointing": 96,
            "starting": 130, "restarting": 60, "queued": 45, "suspended": 0, "lost": 55,
        },
        avoidedNodes=[],
        newestVerifiedCheckpoint={"name": "teach-1200", "folder": "step-00001200.0a1b2c3d", "step": 1200,
                                  "digest": "blake3:" + "1" * 64, "verified": True},
        progress={"step": steps, "totalSteps": 3000, "tokens": steps * 65536, "loss": "2.18", "validationLoss": "2.31",
                  "learningRate": "2.4e-04", "gradientNorm": "0.83", "tokensPerSecond": "41210", "etaSeconds": 2860},
    )  # fmt: skip


def _of_attempt(found: World, checkpoint: Object, job: Object, attempt: int, **status: Any) -> Object:
    metadata = job["metadata"]
    place = {"name": metadata["name"], "uid": metadata["uid"], "attempt": attempt}
    size = {"bytes": 1_620_000_000, "files": 8, "pieces": 64, "folder": "step", "digest": "blake3:" + "a" * 64}
    return found.put_status(checkpoint, job=place, **{**size, **status})


def other_jobs(found: World) -> None:
    """A job that waits, one that is suspended, finished and failed ones, and one that goes on from a checkpoint."""
    found.put_status(found.job("waits"), phase="Pending", message="WaitingForGPUs 3 of 8")
    found.put_status(found.job("paused", run={"suspend": True}), phase="Suspended", message="Suspended at step 900")
    done = found.put_status(
        found.job("done"), phase="Completed", progress={"step": 100, "totalSteps": 100, "loss": "2.5"}
    )
    found.checkpoint(done, 100)
    failed = {"step": 12, "totalSteps": 100, "loss": "9.1"}
    found.put_status(found.job("broken"), phase="Failed", message="DataError: /data/text.txt: line 17", progress=failed)
    found.put_status(_continued(found), phase="Starting", message="LoadingWeights 43 %")


def _continued(found: World) -> Object:
    spec = {name: value for name, value in JOB_SPEC.items() if name != "model"}
    body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "teach-more"}}
    began = {"modelFrom": {"checkpoint": {"name": "teach-800", "state": "All"}}}
    return found.objects.create({**body, "metadata": {"name": "teach-more", "namespace": "default"},
                                 "spec": {**spec, **began}})  # fmt: skip


def deployment(found: World, start: datetime, name: str = "chat") -> Object:
    """A deployment that serves `teach-1200` and served `teach-800` before, with two engines."""
    spec = {
        "model": {"checkpointSelector": {"jobRef": {"name": "teach"}}, "names": [name]},
        "pools": [{"name": "main", "replicas": 2}],
    }
    made = _create(found, "InferenceDeployment", name, spec)
    _create(found, "Service", name, {"selector": {"app": name}, "ports": [{"port": 80}]}, version="v1")
    pool = _create(found, "EnginePool", f"{name}-main", {
        "replicas": 2,
        "revisions": [{"name": "r7", "template": {"config": {"a": 1}, "pod": {"spec": {}}}, "share": 100}],
    })  # fmt: skip
    engines = []
    for number in range(2):
        pod = {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "command": ["true"], "ports": [{"containerPort": ENGINE_PORT}]}],
        }
        found_pod = _create(found, "Pod", f"{name}-main-{number}", pod, version="v1")
        uid, url = found_pod["metadata"]["uid"], f"http://10.0.0.{number}:{ENGINE_PORT}"
        engines.append({"name": f"{name}-main-{number}", "uid": uid, "revision": "r7", "url": url, "phase": "Serving",
                        "ready": True})  # fmt: skip
    found.put_status(pool, phase="Serving", replicas=2, readyReplicas=2, engines=engines)
    return found.put_status(
        made, phase="Serving", endpoint=f"http://{name}.default.svc/v1", models=[name], ready="2/2",
        currentRevision="r7", currentCheckpoint=_served(1200),
        revisions=[
            {"name": "r7", "share": 100, "createdAt": time_at(start, 55), "checkpoint": _served(1200)},
            {"name": "r6", "share": 0, "createdAt": time_at(start, 35), "checkpoint": _served(800)},
        ],
        pools=[{"name": "main", "role": "colocated", "enginePool": f"{name}-main", "replicas": 2, "ready": 2,
                "updated": 2, "decisions": [_decision(start)], "lastStart": LAST_START}],
        router={"replicas": 1, "ready": 1},
    )  # fmt: skip


def _decision(start: datetime) -> Mapping[str, Any]:
    """The autoscaler's newest decision."""
    return {"time": time_at(start, 40), "before": 1, "after": 2, "reason": "FirstTokenLate",
            "message": "the first token takes 240 ms of 200", "inputs": {"ttftMs": "240"}}  # fmt: skip


LAST_START = {
    "engine": "chat-main-1",
    "createdAt": "2026-01-01T00:00:00Z",
    "seconds": 18,
    "parts": {"load": 9, "pull": 5, "schedule": 0, "ready": 4},
}


def _served(step: int) -> Mapping[str, Any]:
    folder = f"step-{step:08}.0a1b2c3d"
    return {"name": f"teach-{step}", "folder": folder, "step": step, "digest": f"blake3:{step:064x}"}


def _create(found: World, kind: str, name: str, spec: Any, version: str = "stoker.dev/v1alpha1") -> Object:
    metadata = {"name": name, "namespace": "default"}
    return found.objects.create({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec})


def many_jobs(found: World, count: int, running: int = 20) -> None:
    """Jobs of the namespace `many` with a number each; the last ones run."""
    for number in range(count):
        job = found.job(f"run-{number:04}", "many")
        if number >= count - running:
            progress = {"step": number, "totalSteps": 1000, "loss": f"{2 + number / 1000:.3f}"}
            found.put_status(job, phase="Running", progress=progress)


def use_checkpoint(found: World, name: str, *users: str) -> None:
    """Write who uses a Checkpoint."""
    checkpoint = next(one for one in found.objects.of_kind("Checkpoint") if one["metadata"]["name"] == name)
    found.put_status(checkpoint, inUseBy=[{"kind": "InferenceDeployment", "name": user} for user in users])
