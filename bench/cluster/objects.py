"""What the benches on a real API server create: jobs, Services, claims; and the agent that answers for every pod."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from e2e.api.api_client import Object

NAMESPACE = "default"
AGENT_PORT = 8080
REPORT = {
    "program": "trainer",
    "attempt": 0,
    "phase": "Training",
    "message": "",
    "step": 10,
    "total_steps": 1000,
    "loss": 2.5,
    "saves": [],
    "requests": {},
}


@asynccontextmanager
async def agents() -> AsyncIterator[None]:
    """Run the agent of every pod: it answers every request with a report of training."""
    body = json.dumps(REPORT).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(head + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):  # the last at the bench's end
            writer.close()

    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind(("0.0.0.0", AGENT_PORT))  # in a network of its own
    async with await asyncio.start_server(answer, sock=listening, backlog=4096):
        yield


def training_job(name: str, pods: int) -> Object:
    model = {
        "architecture": "llama",
        "vocabSize": 512,
        "hiddenSize": 64,
        "intermediateSize": 128,
        "numLayers": 2,
        "numHeads": 4,
    }
    spec = {
        "model": model,
        "workers": {"replicas": pods, "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}}},
        "training": {"totalSteps": 1000, "globalBatchSize": pods, "microBatchSize": 1, "sequenceLength": 64},
        "data": {"sources": [{"name": "text", "path": "/data/text"}]},
        "checkpoint": {"storage": {"claimName": "checkpoints"}},
    }
    return {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": spec,
    }


def in_tree_job(name: str, pods: int, pod: Mapping[str, Any], subdomain: str = "") -> Object:
    """Return a Job with the same pods, without the parts that differ from pod to pod.

    With a `subdomain` its pods have names behind the Service of that name.
    """
    own = ("nodeName", "hostname", "subdomain", "schedulerName", "priority", "preemptionPolicy", "serviceAccount")
    spec = {key: value for key, value in pod.items() if key not in own}
    template = {"metadata": {"labels": {"job": name}}, "spec": {**spec, "subdomain": subdomain} if subdomain else spec}
    job = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": job}


def headless_service(name: str) -> Object:
    """Return a headless Service like the operator's, for the pods of the Job of that name."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job": name},
        "ports": [{"name": "http", "port": AGENT_PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def claim(name: str) -> tuple[Object, Object]:
    """Return a volume and the claim that is bound to it."""
    size = {"storage": "1Gi"}
    volume = {
        "capacity": size,
        "accessModes": ["ReadWriteMany"],
        "hostPath": {"path": "/nowhere"},
        "storageClassName": "",
    }
    asked = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": size},
        "volumeName": name,
        "storageClassName": "",
    }
    return (
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": asked,
        },
    )
