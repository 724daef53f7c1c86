"""The operator on a real API server, with nodes and pods faked by kwok: many pods, many jobs, memory.

  pods    one TrainingJob of 1,000 pods against an in-tree Job of as many pods with the same spec, and against the same
          Job with a headless Service, as a Job needs one
          for pods that shall find each other; same control plane, one after the other, each round in another order:
          seconds until all pods exist, until all of them are ready, and until the status counts all of them as ready
  jobs    250 TrainingJobs of 4 pods posted at once: seconds until every status is Running
  memory  resident memory of the operator's process with 1,000 jobs and 4,000 pods, all Running

Real: etcd, API server, scheduler, controller-manager (the Job is its), the operator as a process of its own as
users run it. Fakes: kubelets and containers. A job is Running when its pods run and pod 0's agent reports that it
trains, so an HTTP server at the pods' addresses answers every poll with that; no program runs, nothing is saved, there
are no Checkpoints. Everything runs in a network of its own, where all those addresses are this machine.

    python -m bench.cluster.scale                       # about 8 minutes, needs `make kube-binaries`
    python -m bench.cluster.scale --pods 200 --jobs 50 --all-jobs 100

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.cluster.fake_nodes import OperatorProcess
from bench.cluster.kube_bench import KubeBench, run_bench, say
from bench.cluster.objects import NAMESPACE, headless_service, in_tree_job, training_job
from e2e.api.api_client import Object, path_of

NODES = 40
GOAL_RATIO, GOAL_JOBS_S, GOAL_MIB = 1.5, 30, 150


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pods", type=int, default=1000, help="pods of the one job")
    parser.add_argument("--jobs", type=int, default=250, help="jobs posted at once")
    parser.add_argument("--all-jobs", type=int, default=1000, help="jobs when memory is measured")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of the one large job; the best of each side counts"
    )
    parser.add_argument("--profile", metavar="FILE", help="cProfile of the operator goes there; it is slower then")
    parser.add_argument("--keep", metavar="FOLDER", help="keep logs there")
    options = parser.parse_args()
    run_bench(Bench, options, NODES, options.keep)


class Bench(KubeBench):
    """The three measurements."""

    async def measure(self) -> dict[str, Any]:
        with self.operator_process(0, profile=self.options.profile) as self.operator:
            return await self._measure(self.operator)

    async def _measure(self, operator: OperatorProcess) -> dict[str, Any]:
        await self._until_leading(operator)
        idle_mib = operator.memory_mib("VmRSS")
        pods = await self._large_jobs()
        say(f"{self.options.pods} pods: {pods['best']}, ratio {pods['ratio']}, goal {GOAL_RATIO}")
        jobs = await self._many_jobs(0, self.options.jobs)
        say(
            f"{self.options.jobs} jobs of 4 pods: all Running after {jobs['running_s']} s, "
            f"goal {GOAL_JOBS_S} s; {jobs['cpu_s']}"
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
            "pods": {"count": self.options.pods, **pods, "goal_ratio": GOAL_RATIO},
            "jobs": {"count": self.options.jobs, **jobs, "goal_s": GOAL_JOBS_S},
            "memory": {"jobs": self.options.all_jobs, **memory, "goal_mib": GOAL_MIB, "processors_at_rest": at_rest},
            "operator_cpu_s": round(operator.cpu_s(), 1),
            "load": os.getloadavg()[0],
        }

    def _cpu_s(self) -> dict[str, float]:
        return {**self.nodes.cpu_s(), "operator": self.operator.cpu_s()}

    def _spent_s(self, before: Mapping[str, float]) -> dict[str, float]:
        """Return the processor time since then; unlike the clock's, it depends little on the machine's other work."""
        return {name: round(now - before.get(name, 0.0), 1) for name, now in self._cpu_s().items()}

    # One large job

    async def _large_jobs(self) -> dict[str, Any]:
        """Run the rounds of all sides.

        A first round is not counted: a fresh API server cuts off bursts of watches until it has seen some.

        Warnings about Services report endpoints that the API server refused; with them the seconds of a side with a
        Service mean little.
        """
        spec = await self._pod_spec()
        await self._round("warm", spec, SIDES)
        rounds = [await self._round(str(number), spec, rotated(SIDES, number)) for number in range(self.options.rounds)]
        best = {side: best_of([found[side] for found in rounds]) for side in SIDES}
        ratio = {
            peer: {what: round(seconds / best[peer][what], 2) for what, seconds in best["trainingjob"].items()}
            for peer in SIDES[1:]
        }
        refused = await self.api.list("Event", NAMESPACE, fieldSelector="type=Warning,involvedObject.kind=Service")
        return {"best": best, "ratio": ratio, "rounds": rounds, "service_warnings": len(refused)}

    async def _pod_spec(self) -> Object:
        """Return the spec of a pod as the operator makes it."""
        body = training_job("small", 1)
        await self.api.create(body)
        async with asyncio.timeout(60):
            while not (pods := await self.api.list("Pod", NAMESPACE)):
                await asyncio.sleep(0.2)
        await self._clear(body)
        return dict(pods[0]["spec"])

    async def _round(self, number: str, spec: Object, sides: Sequence[str]) -> dict[str, dict[str, Any]]:
        found = {}
        for side in sides:
            bodies = bodies_of(side, f"{side}-{number}", self.options.pods, spec)
            found[side] = await self._time(*bodies)
            say(f"round {number}: {side} {found[side]}")
            await self._clear(*bodies)
        return found

    async def _time(self, body: Object, *others: Object) -> dict[str, Any]:
        """Return the seconds from the POST of `body` until all pods exist, run, and are ready in its status."""
        for other in others:
            await self.api.create(other)
        pods = asyncio.create_task(self._stages(await self._version("Pod")))
        ready = asyncio.create_task(self._ready(body["kind"], await self._version(body["kind"])))
        await asyncio.sleep(0.5)
        before, begin = self._cpu_s(), time.monotonic()
        await self.api.create(body)
        created_at, running_at = await asyncio.wait_for(pods, 900)
        ready_at = await asyncio.wait_for(ready, 900)
        stages = {"created_s": created_at, "running_s": running_at, "ready_s": ready_at}
        spent = self._spent_s(before)
        seconds = {what: round(at - begin, 2) for what, at in stages.items()}
        return {**seconds, "processor_s": round(sum(spent.values()), 1), "cpu_s": spent}

    async def _stages(self, version: str) -> tuple[float, float]:
        """Return the moments at which the last pod was added and at which the last one ran."""
        created: dict[str, float] = {}
        running: dict[str, float] = {}
        async for _, found in self.api.follow("Pod", NAMESPACE, version):
            uid = found["metadata"]["uid"]
            created.setdefault(uid, time.monotonic())
            if (found.get("status") or {}).get("phase") == "Running":
                running.setdefault(uid, time.monotonic())
            if len(running) >= self.options.pods:
                return max(created.values()), max(running.values())
        raise AssertionError("it follows for ever")

    async def _ready(self, kind: str, version: str) -> float:
        """Return the moment at which the status of the only resource of its kind counted all pods as ready."""
        async for _, found in self.api.follow(kind, NAMESPACE, version):
            status = found.get("status") or {}
            if (status.get("pods") or status).get("ready", 0) >= self.options.pods:
                return time.monotonic()
        raise AssertionError("it follows for ever")

    async def _version(self, kind: str) -> str:
        """Return the version from which a watch receives later changes."""
        listed = await self.api.ask("GET", path_of(kind, NAMESPACE), query={"limit": "1"})
        return str(listed["metadata"]["resourceVersion"])

    async def _clear(self, *bodies: Object) -> None:
        for body in bodies:
            await self.api.delete(body["kind"], NAMESPACE, body["metadata"]["name"], propagationPolicy="Background")
        async with asyncio.timeout(900):
            while await self.api.list("Pod", NAMESPACE, limit="1"):
                await asyncio.sleep(0.5)
        await asyncio.sleep(2)

    # Many jobs

    async def _many_jobs(self, first: int, last: int) -> dict[str, Any]:
        """Post the jobs with 32 requests at a time; return seconds until accepted and until all are Running."""
        waiting = asyncio.create_task(self._all_running(last - first, await self._version("TrainingJob")))
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

    async def _until_leading(self, operator: OperatorProcess) -> None:
        path = f"apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
        async with asyncio.timeout(60):
            while not (await self.api.ask("GET", path))["items"]:
                operator.memory_mib("VmRSS")
                await asyncio.sleep(0.2)
        await asyncio.sleep(2)


SIDES = ("trainingjob", "job", "job-and-service")


def bodies_of(side: str, name: str, pods: int, spec: Object) -> tuple[Object, ...]:
    """Return the objects of a side; the status of the first one counts."""
    if side == "trainingjob":
        return (training_job(name, pods),)
    if side == "job":
        return (in_tree_job(name, pods, spec),)
    return in_tree_job(name, pods, spec, subdomain=name), headless_service(name)


def best_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the best of each figure of one side.

    `processor_s` is the time of all parts of the cluster together; on a busy machine it means more than the clock.
    """
    return {what: min(found[what] for found in rounds) for what in ("created_s", "running_s", "ready_s", "processor_s")}


def rotated(sides: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the sides in an order in which each is the first of a round once, and follows another."""
    first = number % len(sides)
    return (*sides[first:], *sides[:first])


if __name__ == "__main__":
    main()
