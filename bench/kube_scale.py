"""The operator on a real API server, nodes and pods faked by kwok: many pods of one job, many jobs at once, and what it costs in memory.

  pods    one TrainingJob of 1,000 pods against one in-tree Job of 1,000 pods with the same pod spec, same control plane, one after the other:
          seconds until all pods exist, and until the status counts all of them as ready
  jobs    250 TrainingJobs of 4 pods posted at once: seconds until every status says Running
  memory  resident memory of the operator's process with 1,000 jobs and 4,000 pods, all Running

What is real: etcd, API server, scheduler, controller-manager (the Job is its), the operator as a process of its own as users run it. What is fake: kubelets and
containers. A job is Running when its pods run and pod 0's agent says that it trains, so an HTTP server at the pods' loopback addresses answers every poll with that;
no program runs, nothing is saved, there are no Checkpoints.

    python -m bench.kube_scale                       # about 4 minutes, needs `make kube-binaries`
    python -m bench.kube_scale --pods 200 --jobs 50 --all-jobs 100

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.kube_fake_nodes import FakeNodes, OperatorProcess
from e2e.api.api_client import Object

NAMESPACE = "default"
NODES = 40
AGENT_PORT = 8080
GOAL_RATIO, GOAL_JOBS_S, GOAL_MIB = 1.5, 30, 150
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=1000, help="pods of the one job")
    parser.add_argument("--jobs", type=int, default=250, help="jobs posted at once")
    parser.add_argument("--all-jobs", type=int, default=1000, help="jobs when memory is measured")
    parser.add_argument(
        "--rounds", type=int, default=2, help="rounds of the one large job; the best counts for both sides"
    )
    parser.add_argument("--profile", metavar="FILE", help="cProfile of the operator goes there; it is slower then")
    parser.add_argument("--keep", metavar="FOLDER", help="keep logs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kube-scale-") as folder:
        figures = asyncio.run(Bench(options, Path(options.keep or folder)).run())
    print(json.dumps(figures))


class Bench:
    """The three measurements, one after the other on one control plane."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder

    async def run(self) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        async with agents(), FakeNodes(self.folder, NODES) as self.nodes:
            self.api = self.nodes.api
            for body in claim("checkpoints"):
                await self.api.create(body)
            operator = OperatorProcess(self._config(), self.folder, self.options.profile)
            self.operator = operator
            try:
                figures = await self._measure(operator)
            finally:
                operator.stop()
        return figures

    async def _measure(self, operator: OperatorProcess) -> dict[str, Any]:
        await self._until_leading(operator)
        idle_mib = operator.memory_mib("VmRSS")
        rounds = [await self._round(number) for number in range(self.options.rounds)]
        best = {
            side: {what: min(found[side][what] for found in rounds) for what in ("created_s", "ready_s")}
            for side in ("job", "trainingjob")
        }
        ratios = {what: round(best["trainingjob"][what] / best["job"][what], 2) for what in ("created_s", "ready_s")}
        say(f"{self.options.pods} pods: {best}, ratio {ratios}, goal {GOAL_RATIO}")
        jobs = await self._many_jobs(0, self.options.jobs)
        say(
            f"{self.options.jobs} jobs of 4 pods: all Running after {jobs['running_s']} s, goal {GOAL_JOBS_S} s; {jobs['cpu_s']}"
        )
        await self._many_jobs(self.options.jobs, self.options.all_jobs)
        await asyncio.sleep(10)
        before = operator.cpu_s()
        await asyncio.sleep(10)
        at_rest = round((operator.cpu_s() - before) / 10, 2)
        memory = {
            "idle_mib": idle_mib,
            "resident_mib": operator.memory_mib("VmRSS"),
            "peak_mib": operator.memory_mib("VmHWM"),
        }
        say(f"{self.options.all_jobs} jobs: {memory}, goal {GOAL_MIB} MiB; at rest {at_rest} of a processor")
        return {
            "bench": "kube_scale",
            "pods": {
                "count": self.options.pods,
                "best": best,
                "ratio": ratios,
                "rounds": rounds,
                "goal_ratio": GOAL_RATIO,
            },
            "jobs": {"count": self.options.jobs, **jobs, "goal_s": GOAL_JOBS_S},
            "memory": {"jobs": self.options.all_jobs, **memory, "goal_mib": GOAL_MIB, "processors_at_rest": at_rest},
            "operator_cpu_s": round(operator.cpu_s(), 1),
            "load": os.getloadavg()[0],
        }

    def _cpu_s(self) -> dict[str, float]:
        return {**self.nodes.cpu_s(), "operator": self.operator.cpu_s()}

    def _spent_s(self, before: Mapping[str, float]) -> dict[str, float]:
        """Processor time since then: unlike the clock's, it depends little on what else the machine does."""
        return {name: round(now - before.get(name, 0.0), 1) for name, now in self._cpu_s().items()}

    # One large job

    async def _round(self, number: int) -> dict[str, dict[str, Any]]:
        """The TrainingJob first, because the Job gets the spec of its pods; then the in-tree Job."""
        ours = training_job(f"large-{number}", self.options.pods)
        mine = await self._time("TrainingJob", ours, lambda status: (status.get("pods") or {}).get("ready", 0))
        (pod, *_) = await self.api.list("Pod", NAMESPACE, limit="1")
        await self._clear("TrainingJob", ours)
        theirs = in_tree_job(f"tree-{number}", self.options.pods, pod["spec"])
        other = await self._time("Job", theirs, lambda status: status.get("ready", 0))
        await self._clear("Job", theirs)
        say(f"round {number}: TrainingJob {mine}, Job {other}")
        return {"trainingjob": mine, "job": other}

    async def _time(self, kind: str, body: Object, ready: Callable[[Object], int]) -> dict[str, Any]:
        """Seconds from the POST until all pods exist and until the status counts all as ready."""
        counting = asyncio.create_task(self._all_created())
        await asyncio.sleep(0.5)
        before, begin = self._cpu_s(), time.monotonic()
        await self.api.create(body)
        async with asyncio.timeout(900):
            while True:
                found = await self.api.get(kind, NAMESPACE, body["metadata"]["name"])
                if ready(found.get("status") or {}) >= self.options.pods:
                    break
                await asyncio.sleep(0.05)
        ready_s = time.monotonic() - begin
        created_at = await counting
        spent = self._spent_s(before)
        return {"created_s": round(created_at - begin, 2), "ready_s": round(ready_s, 2), "cpu_s": spent}

    async def _all_created(self) -> float:
        """When the last pod was added."""
        listed = await self.api.ask("GET", f"api/v1/namespaces/{NAMESPACE}/pods")
        seen: set[str] = set()
        async for change, found in self.api.follow("Pod", NAMESPACE, listed["metadata"]["resourceVersion"]):
            if change == "ADDED":
                seen.add(found["metadata"]["uid"])
                if len(seen) >= self.options.pods:
                    return time.monotonic()
        raise AssertionError("it follows for ever")

    async def _clear(self, kind: str, body: Object) -> None:
        await self.api.delete(kind, NAMESPACE, body["metadata"]["name"], propagationPolicy="Background")
        async with asyncio.timeout(900):
            while True:
                if not await self.api.list("Pod", NAMESPACE, limit="1"):
                    break
                await asyncio.sleep(0.5)
        await asyncio.sleep(2)

    # Many jobs

    async def _many_jobs(self, first: int, last: int) -> dict[str, Any]:
        """Post them with 32 requests at a time; seconds until they were accepted and until all are Running."""
        listed = await self.api.ask("GET", f"apis/stoker.dev/v1alpha1/namespaces/{NAMESPACE}/trainingjobs")
        waiting = asyncio.create_task(self._all_running(last - first, listed["metadata"]["resourceVersion"]))
        slots = asyncio.Semaphore(32)
        before, begin = self._cpu_s(), time.monotonic()

        async def post(number: int) -> None:
            async with slots:
                await self.api.create(training_job(f"job-{number:04}", 4))

        await asyncio.gather(*(post(number) for number in range(first, last)))
        posted = time.monotonic()
        running = await asyncio.wait_for(waiting, 1200)
        spent = self._spent_s(before)
        return {"posted_s": round(posted - begin, 2), "running_s": round(running - begin, 2), "cpu_s": spent}

    async def _all_running(self, count: int, version: str) -> float:
        phases: dict[str, str] = {}
        async for _, found in self.api.follow("TrainingJob", NAMESPACE, version):
            phases[found["metadata"]["name"]] = (found.get("status") or {}).get("phase", "")
            if sum(phase == "Running" for phase in phases.values()) >= count:
                return time.monotonic()
        raise AssertionError("it follows for ever")

    # Surroundings

    def _config(self) -> Path:
        config = {
            "namespace": NAMESPACE,
            "api": {"kubeconfig": str(self.nodes.plane.kubeconfig)},
            "listen": {"host": "127.0.0.1", "port": 0},
            "log_level": "warning",
        }
        file = self.folder / "operator.json"
        file.write_text(json.dumps(config))
        return file

    async def _until_leading(self, operator: OperatorProcess) -> None:
        path = f"apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        async with asyncio.timeout(60):
            while not (await self.api.ask("GET", path))["items"]:
                operator.memory_mib("VmRSS")
                await asyncio.sleep(0.2)
        await asyncio.sleep(2)


@asynccontextmanager
async def agents() -> AsyncIterator[None]:
    """The agent of every pod: whatever is asked, it trains."""
    body = json.dumps(REPORT).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(head + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")  # every loopback address, and no other
    listening.bind(("0.0.0.0", AGENT_PORT))
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


def in_tree_job(name: str, pods: int, pod: Mapping[str, Any]) -> Object:
    """A Job with the same pods, less what belongs to one pod alone."""
    own = ("nodeName", "hostname", "subdomain", "schedulerName", "priority", "preemptionPolicy", "serviceAccount")
    template = {"spec": {key: value for key, value in pod.items() if key not in own}}
    spec = {"parallelism": pods, "completions": pods, "completionMode": "Indexed", "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


def claim(name: str) -> tuple[Object, Object]:
    """A volume and the claim that is bound to it."""
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


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
