"""Many gangs on a real API server, beside the same pods as in-tree Jobs and as JobSets; memory; passes under events.

  gangs     1,000 TrainingJobs of 4 pods, placed by the operator: seconds from the first POST until every
            status is Running. Then, on the same control plane, as many in-tree Jobs of 4 pods with a headless Service
            each, and as many JobSets of 4 pods (JobSet's own controller), until the status of each counts its pods as
            ready. The ratios mean more than the seconds
  events    50 changes of pods a second against those jobs: the 99th percentile of the time of a pass, from the
            operator's own histogram, as the bound of its bucket
  memory    resident memory of an operator that starts on the full cluster (1,000 nodes, 10,000 pods), with the view of
            nodes and all pods, and without it

Real and fake are the same as in `kube_scale.py`, with the parts of `kube_bench.py` and `kube_objects.py`.

    python -m bench.cluster.gangs                       # about 12 minutes; needs `make kube-binaries kube-controllers`
    python -m bench.cluster.gangs --jobs 20 --nodes 20 --pods 200 --events-s 5
    python -m bench.cluster.gangs --jobs 150 --nodes 150 --only-sides --costs FOLDER     # requests, processor seconds

The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from bench.cluster.costs import PROFILING, ApiServerCosts
from bench.cluster.fake_nodes import OperatorProcess
from bench.cluster.kube_bench import KubeBench, run_bench, say
from bench.cluster.objects import NAMESPACE, headless_service, in_tree_job, training_job
from e2e.api.api_client import Object, path_of
from e2e.cluster.foreign_controllers import jobset, running

PODS = 4
"""Pods of one gang."""
METRICS_PORT = 9090
METRICS = f"http://127.0.0.1:{METRICS_PORT}/metrics"
GOALS = {
    "gangs_s": 90,
    "ratio_to_jobs_with_services": 1.5,
    "resident_mib_without_view": 140,
    "resident_mib_with_view": 200,
    "pass_p99_ms": 50,
}
EVENTS_PER_S = 50
WITHOUT_VIEW = {"nodes": False, "pods": False}
REST_S = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="gangs of each side")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=10_000, help="pods of all owners when memory is measured")
    parser.add_argument("--events-s", type=int, default=60, help="seconds of events")
    parser.add_argument("--without-jobset", action="store_true", help="leave JobSet's controller out")
    parser.add_argument("--only-sides", action="store_true", help="gangs and Jobs alone: no JobSets, events, memory")
    parser.add_argument("--costs", metavar="FOLDER", type=Path, help="write CPU profiles of the API server there")
    parser.add_argument("--profile", metavar="FILE", help="cProfile of the operator goes there; it is slower then")
    parser.add_argument("--keep", metavar="FOLDER", help="keep logs there")
    options = parser.parse_args()
    run_bench(Bench, options, options.nodes, options.keep)


class Bench(KubeBench):
    """The measurements of the docstring."""

    api_server_flags = PROFILING

    async def measure(self) -> dict[str, Any]:
        self.costs = ApiServerCosts(self.api.access, self.options.costs)
        with self.operator_process(METRICS_PORT, profile=self.options.profile) as operator:
            await self._until_leading(operator)
            before = operator.cpu_s()
            gangs = await self._side("TrainingJob", "gang", lambda name: (training_job(name, PODS),))
            gangs["cpu_s"]["operator"] = round(operator.cpu_s() - before, 1)
            say(f"operator: {gangs['cpu_s']['operator']} s, {operator.memory_mib('VmRSS')} MiB")
            events = {} if self.options.only_sides else await self._under_events()
        peers = await self._peers()
        if self.options.only_sides:
            return self._figures(gangs, peers, {}, {})
        await self._fill()
        memory = {name: await self._memory(watch) for name, watch in (("with", {}), ("without", WITHOUT_VIEW))}
        return self._figures(gangs, peers, events, memory)

    def _figures(
        self, gangs: Mapping[str, Any], peers: Mapping[str, Any], events: Mapping[str, Any], memory: Mapping[str, Any]
    ) -> dict[str, Any]:
        ratios = {name: round(gangs["running_s"] / found["running_s"], 2) for name, found in peers.items()}
        return {
            "bench": "kube_gangs",
            "jobs": self.options.jobs,
            "nodes": self.options.nodes,
            "gangs": gangs,
            "peers": peers,
            "ratios": ratios,
            "events": events,
            "memory": memory,
            "goals": GOALS,
            "load": os.getloadavg()[0],
        }

    # Gangs and their peers

    async def _peers(self) -> dict[str, dict[str, Any]]:
        spec = await self._pod_spec()
        found = {
            "jobs_with_services": await self._side(
                "Job", "job", lambda name: (headless_service(name), in_tree_job(name, PODS, spec, subdomain=name))
            )
        }
        if not (self.options.without_jobset or self.options.only_sides):
            plane = self.nodes.plane
            controller = await asyncio.to_thread(jobset, plane)
            with contextlib.ExitStack() as stack:
                await asyncio.to_thread(stack.enter_context, running(plane, controller))
                found["jobsets"] = await self._side("JobSet", "set", lambda name: (job_set(name, spec),))
                await self._clear_job_sets()
        return found

    async def _side(self, kind: str, prefix: str, bodies_of: Callable[[str], tuple[Object, ...]]) -> dict[str, Any]:
        """Post the objects with 32 requests at a time; return seconds until accepted and until all of them run."""
        names = [f"{prefix}-{number:04}" for number in range(self.options.jobs)]
        listed = await self.api.ask("GET", path_of(kind, NAMESPACE), query={"limit": "1"})
        waiting = asyncio.create_task(self._all_run(kind, prefix, str(listed["metadata"]["resourceVersion"])))
        slots = asyncio.Semaphore(32)

        async def post(name: str) -> None:
            async with slots:
                for body in bodies_of(name):
                    await self.api.create(body)

        found: dict[str, Any] = {}
        async with self.costs.of(prefix, found):
            before, begin = self.nodes.cpu_s(), time.monotonic()
            await asyncio.gather(*map(post, names))
            posted = time.monotonic()
            done = await asyncio.wait_for(waiting, 1800)
            spent = {part: round(now - before.get(part, 0.0), 1) for part, now in self.nodes.cpu_s().items()}
        found |= {"posted_s": round(posted - begin, 2), "running_s": round(done - begin, 2), "cpu_s": spent}
        say(f"{self.options.jobs} {kind}s of {PODS} pods: {found}")
        return found

    async def _all_run(self, kind: str, prefix: str, version: str) -> float:
        done: set[str] = set()
        async for _, found in self.api.follow(kind, NAMESPACE, version):
            name = found["metadata"]["name"]
            if name.startswith(prefix) and runs(kind, found.get("status") or {}):
                done.add(name)
            if len(done) >= self.options.jobs:
                return time.monotonic()
        raise AssertionError("it follows for ever")

    async def _pod_spec(self) -> Object:
        """Return the spec of a pod as the operator made it, without what holds it to one node."""
        pod = (await self.api.list("Pod", NAMESPACE, limit="1"))[0]
        return {key: value for key, value in pod["spec"].items() if key not in ("affinity", "schedulingGates")}

    async def _clear_job_sets(self) -> None:
        """Delete them and wait until their pods are gone, which would count when the cluster is filled."""
        for number in range(self.options.jobs):
            await self.api.delete("JobSet", NAMESPACE, f"set-{number:04}", propagationPolicy="Background")
        async with asyncio.timeout(900):
            while await self.api.list("Pod", NAMESPACE, labelSelector="jobset.sigs.k8s.io/jobset-name", limit="1"):
                await asyncio.sleep(1)

    # Passes under events

    async def _under_events(self) -> dict[str, Any]:
        """Change pods at a steady rate; return the passes in that time and the bound below which 99 % of them were."""
        pods = [pod["metadata"]["name"] for pod in await self.api.list("Pod", NAMESPACE)]
        await asyncio.sleep(REST_S)
        before, begin = await self._passes(), time.monotonic()
        sent = 0
        async with asyncio.TaskGroup() as requests:
            while (passed := time.monotonic() - begin) < self.options.events_s:
                if sent < passed * EVENTS_PER_S:
                    requests.create_task(self._change(pods[sent % len(pods)], sent))
                    sent += 1
                else:
                    await asyncio.sleep(0.005)
        await asyncio.sleep(2)
        after = await self._passes()
        counts = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
        found = {
            "events_per_s": round(sent / self.options.events_s, 1),
            "passes": int(counts[float("inf")]),
            "p99_ms": round(1e3 * quantile(counts, 0.99), 1),
        }
        say(f"events: {found}, goal p99 {GOALS['pass_p99_ms']} ms")
        return found

    async def _change(self, pod: str, number: int) -> None:
        body = {"metadata": {"annotations": {"bench.stoker.dev/event": str(number)}}}
        await self.api.patch("Pod", NAMESPACE, pod, body)

    async def _passes(self) -> dict[float, float]:
        """Cumulative counts of passes over TrainingJobs by the bound of their time, in seconds."""
        async with aiohttp.ClientSession() as session, session.get(METRICS) as answer:
            text = await answer.text()
        return {
            float(sample.labels["le"]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "stoker_operator_reconcile_seconds_bucket" and sample.labels["kind"] == "TrainingJob"
        }

    # Memory

    async def _fill(self) -> None:
        """Add plain pods of another namespace until there are as many as asked for."""
        there = await self._count_pods()
        missing = self.options.pods - there
        if missing <= 0:
            return
        await self.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "others"}})
        spec = await self._pod_spec()
        job = in_tree_job("filler", missing, {**spec, "volumes": [], "containers": [plain(spec)]})
        await self.api.create({**job, "metadata": {"name": "filler", "namespace": "others"}})
        async with asyncio.timeout(1800):
            while await self._count_pods() < self.options.pods:
                await asyncio.sleep(2)

    async def _count_pods(self) -> int:
        answer = await self.api.ask("GET", "api/v1/pods", query={"limit": "1"})
        return len(answer["items"]) + int(answer["metadata"].get("remainingItemCount", 0))

    async def _memory(self, watch: Mapping[str, bool]) -> dict[str, float]:
        """Memory of a fresh operator that has seen everything and is at rest."""
        with self.operator_process(METRICS_PORT, watch=dict(watch)) as operator:
            await self._until_leading(operator)
            await asyncio.sleep(REST_S)
            found = {"resident_mib": operator.memory_mib("VmRSS"), "peak_mib": operator.memory_mib("VmHWM")}
        say(f"memory {'without' if watch else 'with'} the view of nodes: {found}")
        return found

    # Surroundings

    async def _until_leading(self, operator: OperatorProcess) -> None:
        async with asyncio.timeout(180):
            while not await self._leads():
                operator.memory_mib("VmRSS")
                await asyncio.sleep(0.5)
        await asyncio.sleep(2)

    async def _leads(self) -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(METRICS) as found:
                return "stoker_operator_leader 1.0" in await found.text()
        return False


def runs(kind: str, status: Mapping[str, Any]) -> bool:
    """Whether the status of a gang counts all of its pods as ready."""
    if kind == "TrainingJob":
        return bool(status.get("phase") == "Running")
    if kind == "Job":
        return bool(status.get("ready", 0) >= PODS)
    return any(found.get("ready", 0) >= 1 for found in status.get("replicatedJobsStatus") or ())


def job_set(name: str, pod: Mapping[str, Any]) -> Object:
    """Return a JobSet of one Job with the same pods; its controller makes the headless Service."""
    job = in_tree_job(name, PODS, pod)["spec"]
    replicated = {"name": "w", "replicas": 1, "template": {"spec": job}}
    metadata = {"name": name, "namespace": NAMESPACE}
    spec = {"replicatedJobs": [replicated]}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def plain(spec: Mapping[str, Any]) -> Object:
    """The main container without mounts."""
    main: Mapping[str, Any] = spec["containers"][0]
    return {key: main[key] for key in ("name", "image", "command", "resources") if key in main}


def quantile(counts: Mapping[float, float], share: float) -> float:
    """The smallest bound that holds this share of a cumulative histogram; 0 for an empty one."""
    whole = counts[float("inf")]
    return next((bound for bound in sorted(counts) if whole and counts[bound] >= share * whole), 0.0)


if __name__ == "__main__":
    main()
