"""1,000 training jobs and 50 deployments in the operator: time, API writes, memory.

Two processes. One is the operator alone: the real loop with its informers, queue, poller and executor. The other is
everything else: an API server in memory with admission from the generated CRDs, pods that start at once, and what they
answer to polls. They talk JSON over a Unix socket, so the operator pays for decoding as it would for an API server (but
not for TLS and HTTP).

Each job has one pod, a report, and two verified Checkpoints; each deployment serves the newest checkpoint of one job
with one engine and one router. All lie in one namespace, which is the worst case.

  create   from the first manifest until every job is Running with its Checkpoints verified and every deployment is
           Serving
  rest     a pass over every resource when nothing has changed; it must write nothing
  change   every job's report moves on at the same moment, until every status shows it
  restart  another operator on the full cluster, until its queue is empty; it must write nothing

    python bench/reconcilers.py                     # about 4 minutes
    python bench/reconcilers.py --jobs 100 --deployments 5

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stoker.operator.admission.admission import Admission
from stoker.operator.api.crd import KIND_INFOS, definition
from stoker.operator.cluster.interface import ClusterError
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.local.watch_history import Record
from stoker.operator.domain.clock import SystemClock
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.pod.writer import writer_of

CHILD = Path(__file__).with_name("operator_process.py")
GOAL_MIB = 120
SAVES = (100, 200)
QUIET_S = 3.0
BOOKMARK_S = 20.0
WRITES = ("create", "apply", "patch", "update_status", "scale", "delete")


class World:
    """API server, kubelet and pods."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        admission = Admission(definition(info) for info in KIND_INFOS)
        numbers = itertools.count(1)
        self.settings = settings
        self.objects = ObjectStore(
            now=SystemClock().now,
            new_uid=lambda: f"00000000-0000-4000-8000-{next(numbers):012}",
            admit=lambda new, old: admission.admit(new) if old is None else new,  # updates are the operator's own
            history=200_000,
        )
        self.objects.listeners.append(self._on_change)
        self.writes: Counter[str] = Counter()
        self.written_at = time.monotonic()
        self.step = 250
        """The step of every job."""
        self.snapshots: dict[str, Mapping[str, Any]] = {}
        """Router pod's uid -> snapshot that it took."""
        self.watches: list[tuple[str, asyncio.StreamWriter]] = []
        self._starting: list[Ref] = []

    # Requests of the operator

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                number, method, arguments = json.loads(line)
                if method == "watch":
                    self._watch(arguments[0], int(arguments[1]), writer)
                    continue
                try:
                    error, result = None, self._carry_out(method, arguments)
                except ClusterError as failure:
                    error, result = type(failure).__name__, str(failure)
                writer.write(json.dumps([number, error, result]).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    def _watch(self, kind: str, version: int, writer: asyncio.StreamWriter) -> None:
        for record in self.objects.since(version):
            if record.object["kind"] == kind:
                _send(writer, record)
        self.watches.append((kind, writer))

    def _carry_out(self, method: str, arguments: list[Any]) -> Any:
        if method in WRITES:
            event = method == "create" and arguments[0]["kind"] == "Event"
            self.writes["events" if event else method] += 1
            self.written_at = time.monotonic()
        return getattr(self, f"_{method}")(*arguments)

    def _list(self, kind: str, first: int, count: int) -> Any:
        """Return one page. No writes happen while an operator lists here, so the pages fit together."""
        return self.objects.of_kind(kind)[first : first + count], str(self.objects.version)

    def _get(self, kind: str, namespace: str, name: str) -> Object:
        return self.objects.get(Key(kind, namespace, name))

    def _create(self, body: Object) -> Object:
        return self.objects.create(body)

    def _apply(self, body: Object, manager: str) -> Object:
        return self.objects.apply(body, manager)

    def _patch(self, ref: list[str], body: Object) -> Object:
        return self.objects.patch(Ref(*ref), body)

    def _update_status(self, ref: list[str], status: Object, version: str | None) -> Object:
        return self.objects.update_status(Ref(*ref), status, version)

    def _scale(self, ref: list[str], replicas: int) -> None:
        self.objects.scale(Ref(*ref), replicas)

    def _delete(self, ref: list[str]) -> Object | None:
        return self.objects.delete(Ref(*ref))

    def _call(self, pod: list[str], _method: str, path: str, body: Mapping[str, Any]) -> Object:
        if path == "/backends":
            self.snapshots[pod[3]] = body
        return {}

    def _poll(self, pod: list[str]) -> Object:
        labels = self.objects.get(Key(*pod[:3]))["metadata"]["labels"]
        role = labels["stoker.dev/role"]
        if role == "engine":
            return {
                "program": "engine",
                "pod_uid": pod[3],
                "phase": "Serving",
                "message": "",
                "running": 3,
                "waiting": 0,
            }
        if role == "router":
            taken = self.snapshots.get(pod[3], {"version": 0, "backends": []})
            backends = [{**backend, "healthy": True, "pending": 0} for backend in taken["backends"]]
            return {"program": "router", "pod_uid": pod[3], "snapshot_version": taken["version"], "backends": backends}
        return report(pod[3], labels, self.step)

    # Background tasks

    async def bookmark(self) -> None:
        """Send a bookmark: an informer takes a watch for dead after a long silence."""
        while True:
            await asyncio.sleep(BOOKMARK_S)
            for kind, writer in self.watches:
                if not writer.is_closing():
                    version = {"kind": kind, "metadata": {"resourceVersion": str(self.objects.version)}}
                    writer.write(json.dumps(["BOOKMARK", version]).encode() + b"\n")

    def _on_change(self, record: Record) -> None:
        kind = record.object["kind"]
        for watched, writer in self.watches:
            if watched == kind and not writer.is_closing():
                _send(writer, record)
        if kind == "Pod" and record.type == "ADDED":
            metadata = record.object["metadata"]
            ref = Ref("Pod", metadata["namespace"], metadata["name"], metadata["uid"])
            asyncio.get_running_loop().call_later(0.01, self._start, ref)

    def _start(self, ref: Ref) -> None:
        """Place the pod as the scheduler does, and run it as the kubelet does."""
        self.objects.patch(ref, {"spec": {"nodeName": "node-1"}})
        address = (
            f"10.{self.objects.version // 62500 % 250}.{self.objects.version // 250 % 250}.{self.objects.version % 250}"
        )
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        running = {
            "name": "main",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
        }
        status = {
            "phase": "Running",
            "podIP": address,
            "hostIP": "10.0.0.1",
            "conditions": [ready],
            "containerStatuses": [running],
        }
        self.objects.update_status(ref, status)

    def count(self, kind: str, fits: Callable[[Object], bool]) -> int:
        return sum(fits(found) for found in self.objects.of_kind(kind))


def _send(writer: asyncio.StreamWriter, record: Record) -> None:
    writer.write(json.dumps([record.type, record.object]).encode() + b"\n")


def report(pod_uid: str, labels: Mapping[str, str], step: int) -> Object:
    """Return the report of the agent of a job of two ranks."""
    uid, attempt = labels["stoker.dev/job-uid"], int(labels["stoker.dev/attempt"])
    saves = [save(uid, attempt, number) for number in SAVES]
    return {
        "program": "trainer",
        "pod_uid": pod_uid,
        "job_uid": uid,
        "attempt": attempt,
        "phase": "Training",
        "message": "",
        "step": step,
        "total_steps": 1_000_000,
        "tokens": step * 4096,
        "loss": 2.5 + 1 / step,
        "validation_loss": 2.6,
        "learning_rate": 3e-4,
        "grad_norm": 0.8,
        "tokens_per_s": 51234.5,
        "eta_s": 86400.0,
        "progressed_at": 1767225600 + step,
        "saves": saves,
        "requests": {},
        "nodes": [{"node_rank": 0, "reachable": True, "phase": "Training", "step": step}],
        "cause": None,
    }


def save(uid: str, attempt: int, step: int) -> Object:
    folder = f"step-{step:08d}.{writer_of(uid, attempt)}"
    layout = {"world_size": 2, "data_parallel": 2, "zero_stage": 1}
    figures = {"tokens": step * 4096, "loss": 2.7, "validation_loss": 2.8, "bytes": 1_620_000_000, "layout": layout}
    digest = f"blake3:{step:064x}"
    state = {"state": "Committed", "verified": True, "reason": "interval", "step": step}
    return {"id": folder, "folder": folder, "digest": digest, **state, **figures}


# Manifests


def claim(name: str) -> Object:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def job(number: int) -> Object:
    model = {"architecture": "llama", "vocabSize": 49152, "hiddenSize": 576, "intermediateSize": 1536, "numLayers": 30}
    model |= {"numHeads": 9, "numKvHeads": 3, "tieEmbeddings": True}
    corpus = {"name": "corpus", "persistentVolumeClaim": {"claimName": "corpus", "readOnly": True}}
    workers = {
        "replicas": 1,
        "ranksPerPod": 2,
        "resources": {"requests": {"cpu": "8", "memory": "32Gi"}},
        "volumes": [corpus],
        "volumeMounts": [{"name": "corpus", "mountPath": "/data", "readOnly": True}],
    }
    spec = {
        "model": model,
        "workers": workers,
        "training": {"totalSteps": 1_000_000, "globalBatchSize": 64, "microBatchSize": 4, "sequenceLength": 2048},
        "optimization": {"learningRate": "3e-4", "warmupSteps": 200},
        "data": {"sources": [{"name": "text", "path": "/data/**/*.jsonl"}], "validation": {"fraction": "0.01"}},
        "checkpoint": {"storage": {"claimName": "checkpoints"}, "intervalSteps": 100, "maxToKeep": 5},
    }
    return ours("TrainingJob", f"job-{number:04}", spec)


def deployment(number: int) -> Object:
    selector = {"jobRef": {"name": f"job-{number:04}"}, "policy": "newest"}
    spec = {"model": {"checkpointSelector": selector}, "pools": [{"name": "main"}]}
    return ours("InferenceDeployment", f"chat-{number:04}", spec)


def ours(kind: str, name: str, spec: Object) -> Object:
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


# The operator's process


class OperatorProcess:
    """The operator's process, with its answers."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, socket: Path, settings: Mapping[str, Any]) -> OperatorProcess:
        given = (sys.executable, str(CHILD), str(socket), json.dumps(settings))
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*given, stdin=pipe, stdout=pipe))

    async def read(self) -> Any:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise SystemExit("the operator's process ended")
        return json.loads(line)

    async def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        return await self.read()

    async def stop(self) -> None:
        self.process.terminate()
        await self.process.wait()


# The four measurements


class Bench:
    def __init__(self, options: argparse.Namespace, world: World, socket: Path) -> None:
        self.options = options
        self.world = world
        self.socket = socket

    async def run(self) -> dict[str, Any]:
        operator = await OperatorProcess.start(self.socket, self.world.settings)
        imported = await operator.read()
        result = {
            "bench": "reconcilers",
            "jobs": self.options.jobs,
            "deployments": self.options.deployments,
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 1),
            "imported_mib": imported["resident_mib"],
            "create": await self.create(operator),
            "rest": await self.rest(operator),
            "change": await self.change(operator),
        }
        await operator.stop()
        operator = await OperatorProcess.start(self.socket, self.world.settings)
        await operator.read()
        result["restart"] = await self.restart(operator)
        await operator.stop()
        result["resident_mib"] = max(result[name]["resident_mib"] for name in ("create", "change", "restart"))
        result["goal_met"] = (
            result["resident_mib"] <= GOAL_MIB and not result["rest"]["writes"] | result["restart"]["writes"]
        )
        return result

    async def create(self, operator: OperatorProcess) -> dict[str, Any]:
        begin = time.monotonic()
        objects = self.world.objects
        for body in (claim("corpus"), claim("checkpoints")):
            objects.create(body)
        for number in range(self.options.jobs):
            objects.create(job(number))
            await asyncio.sleep(0)
        for number in range(self.options.deployments):
            objects.create(deployment(number))
            await asyncio.sleep(0)
        await self.until(self.all_good)
        seconds = time.monotonic() - begin
        await self.quiet(operator)
        return {"seconds": round(seconds, 1), **self.taken(), **await self.figures(operator)}

    async def rest(self, operator: OperatorProcess) -> dict[str, Any]:
        await operator.ask("look")  # the first one warms caches up
        passes = await operator.ask("look")
        before = await operator.ask("figures")
        await asyncio.sleep(10)
        after = await operator.ask("figures")
        share = (after["cpu_s"] - before["cpu_s"]) / 10
        await self.quiet(operator)
        return {"passes": passes, "cpu_share": round(share, 3), **self.taken()}

    async def change(self, operator: OperatorProcess) -> dict[str, Any]:
        """Measure several rounds; the figures are per round."""
        seconds, cpu_s, passes = [], 0.0, Counter[str]()
        rounds = self.options.rounds
        for _ in range(rounds):
            before = await operator.ask("figures")
            begin = time.monotonic()
            self.world.step += 10
            await self.until(self.all_told)
            seconds.append(time.monotonic() - begin)
            await self.quiet(operator)
            after = await operator.ask("figures")
            passes += Counter(after["passes"]) - Counter(before["passes"])
            cpu_s += after["cpu_s"] - before["cpu_s"]
        writes = self.taken()["writes"]
        return {
            "rounds": rounds,
            "seconds": round(sum(seconds) / rounds, 2),
            "writes_per_job": round(sum(writes.values()) / rounds / self.options.jobs, 3),
            "writes": writes,
            **await self.figures(operator),
            "cpu_s": round(cpu_s / rounds, 2),
            "passes": {kind: count // rounds for kind, count in passes.items()},
        }

    async def restart(self, operator: OperatorProcess) -> dict[str, Any]:
        begin = time.monotonic()
        while not await self.has_looked_at_everything(operator):  # a process is asked
            await asyncio.sleep(0.2)
        seconds = time.monotonic() - begin
        await self.quiet(operator)
        return {"seconds": round(seconds, 1), **self.taken(), **await self.figures(operator)}

    # Help

    @property
    def resources(self) -> int:
        return self.options.jobs * (1 + len(SAVES)) + self.options.deployments * 2

    async def has_looked_at_everything(self, operator: OperatorProcess) -> bool:
        found = await operator.ask("figures")
        return bool(found["idle"] and sum(found["passes"].values()) >= self.resources)

    def all_good(self) -> bool:
        def running(found: Object) -> bool:
            status = found.get("status", {})
            return (
                status.get("phase") == "Running"
                and (status.get("newestVerifiedCheckpoint") or {}).get("step") == SAVES[-1]
            )

        def serving(found: Object) -> bool:
            return bool(found.get("status", {}).get("phase") == "Serving")

        return (
            self.world.count("TrainingJob", running) == self.options.jobs
            and self.world.count("InferenceDeployment", serving) == self.options.deployments
        )

    def all_told(self) -> bool:
        def told(found: Object) -> bool:
            return bool(found["status"]["progress"]["step"] == self.world.step)

        return self.world.count("TrainingJob", told) == self.options.jobs

    async def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + self.options.timeout
        while not done():
            if time.monotonic() > end:
                raise SystemExit(f"not there after {self.options.timeout} s; writes so far: {dict(self.world.writes)}")
            await asyncio.sleep(0.5)

    async def quiet(self, operator: OperatorProcess) -> None:
        """Wait until all writes are done and the queue is empty."""
        while not await self.is_quiet(operator):
            await asyncio.sleep(0.2)

    async def is_quiet(self, operator: OperatorProcess) -> bool:
        idle = (await operator.ask("figures"))["idle"]
        return bool(idle and time.monotonic() - self.world.written_at >= QUIET_S)

    def taken(self) -> dict[str, Any]:
        """Return the writes since the last call."""
        found = dict(self.world.writes)
        self.world.writes.clear()
        return {"writes": found}

    async def figures(self, operator: OperatorProcess) -> dict[str, Any]:
        found = await operator.ask("figures")
        return {
            name: found[name] for name in ("resident_mib", "peak_mib", "cpu_s", "passes", "objects") if name in found
        }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "api.sock"
        world = World({"poll_interval_s": options.poll_interval})
        server = await asyncio.start_unix_server(world.serve, socket, limit=1 << 28)
        bookmarks = asyncio.create_task(world.bookmark())
        try:
            return await Bench(options, world, socket).run()
        finally:
            bookmarks.cancel()
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--deployments", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of change")
    parser.add_argument("--poll-interval", type=float, default=2.0, help="seconds between two polls of a pod")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that one step may take")
    result = asyncio.run(measure(parser.parse_args()))
    show(result)
    print(json.dumps(result))


def show(result: Mapping[str, Any]) -> None:
    create, rest, change, restart = (result[name] for name in ("create", "rest", "change", "restart"))
    every = rest["passes"]["all"]
    print(f"create   {create['seconds']} s until all run, passes {create['passes']}, writes {create['writes']}")
    print(
        f"rest     a pass takes {every['p50_ms']} ms (p95 {every['p95_ms']}), "
        f"writes {rest['writes'] or 'none'} (goal none)"
    )
    for kind in sorted(set(rest["passes"]) - {"all"}):
        print(f"           {kind} {rest['passes'][kind]['p50_ms']} ms (p95 {rest['passes'][kind]['p95_ms']})")
    print(f"           polls alone take {100 * rest['cpu_share']:.0f} % of a core")
    print(
        f"change   {change['seconds']} s until every status is right, {change['cpu_s']} s of CPU, "
        f"passes {change['passes']}, "
        f"{change['writes_per_job']} writes per job"
    )
    print(
        f"restart  {restart['seconds']} s, passes {restart['passes']}, writes {restart['writes'] or 'none'} (goal none)"
    )
    print(
        f"memory   {result['resident_mib']} MiB resident (goal {GOAL_MIB}), "
        f"{result['imported_mib']} MiB of it before the first "
        f"object, peak {max(one['peak_mib'] for one in (create, change, restart))} MiB; objects {change['objects']}"
    )


if __name__ == "__main__":
    main()
