"""What each request of a gang costs a real API server, in processor seconds.

The operator runs on the cluster in memory, with one TrainingJob of four pods, and its requests are recorded. They are
then sent to an API server for many gangs, one kind of request after the other, and its processor time is read between
the kinds. There are no controllers, nodes or watches, so nothing else uses that time.

    python -m bench.cluster.kube_requests                    # about a minute; needs `make kube-binaries`
    python -m bench.cluster.kube_requests --gangs 20

The last line is JSON: milliseconds of processor time for each gang, by kind of request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.cluster.fake_nodes import CRDS, cpu_s
from bench.cluster.kube_bench import say
from bench.cluster.objects import claim, training_job
from e2e.api.access import read_kubeconfig
from e2e.api.api_client import ApiClient, path_of
from e2e.cluster import binaries
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import wait_until_established
from e2e.cluster.tools import ETCD, KUBERNETES
from stoker.operator.cluster.interface import Cluster
from stoker.operator.domain.plan import Key, Object, Ref
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.operator import Operator
from stoker.operator.reconcile.trainingjob.reconcile import reconcile_trainingjob
from stoker.operator.render.keys import keys_object
from testing.operator.fakes import FakePods, Flaky, embedded, settle

NAMESPACE = "default"
NAME = "gang-0000"
JOB = Key("TrainingJob", NAMESPACE, NAME)
PODS = 4
AT_ONCE = 16
MANAGER = {"fieldManager": "stoker-operator"}
REPORT = {"program": "trainer", "attempt": 0, "phase": "Training", "message": "", "step": 1, "total_steps": 1000}


class Request(NamedTuple):
    """One recorded request: POST, APPLY, PATCH or PUT of a status."""

    verb: str
    about: Object | Ref
    body: Mapping[str, Any]

    @property
    def name(self) -> str:
        kind = self.about.kind if isinstance(self.about, Ref) else self.about["kind"]
        return f"{self.verb} {kind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gangs", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kube-requests-") as folder:
        uids, requests = asyncio.run(record(Path(folder) / "memory"))
        with ControlPlane(Path(folder) / "plane", "requests") as plane:
            define(plane)
            found = asyncio.run(Replay(plane, uids, requests, options.gangs).run())
    print(json.dumps({"bench": "kube_requests", "gangs": options.gangs, **found}))


def define(plane: ControlPlane) -> None:
    """Create our kinds and wait until they are served."""
    kubectl = str(binaries.find([ETCD, KUBERNETES]) / "kubectl")

    def run(*given: str) -> str:
        command = [kubectl, "--kubeconfig", str(plane.kubeconfig), *given]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    run("apply", "--server-side", "-f", str(CRDS))
    wait_until_established(run, "-f", str(CRDS))


# Recording


class Recorder(Flaky):
    """A cluster that notes what is written, and never fails."""

    def __init__(self, inner: Cluster) -> None:
        super().__init__(inner, fail_at=0, after=False)
        self.requests: list[Request] = []

    async def create(self, body: Object) -> Object:
        self.requests.append(Request("POST", body, body))
        return await super().create(body)

    async def apply(self, body: Object, *, manager: str) -> Object:
        self.requests.append(Request("APPLY", body, body))
        return await super().apply(body, manager=manager)

    async def patch(self, ref: Ref, body: Mapping[str, Any]) -> Object:
        self.requests.append(Request("PATCH", ref, body))
        return await super().patch(ref, body)

    async def update_status(self, ref: Ref, status: Object, *, resource_version: str | None = None) -> Object:
        self.requests.append(Request("PUT status", ref, status))
        return await super().update_status(ref, status, resource_version=resource_version)


async def record(folder: Path) -> tuple[str, list[Request]]:
    """Run one gang until it trains; return the job's uid and the operator's writes in their order."""
    pods = FakePods()
    world = embedded(folder, pods=pods)
    cluster = Recorder(world.cluster)
    operator = Operator(
        cluster, Settings(), {"TrainingJob": reconcile_trainingjob}, clock=world.clock, everything=cluster
    )
    running = asyncio.ensure_future(operator.run())
    await settle()
    world.objects.create(keys_object(NAMESPACE, operator.settings))
    _, asked = claim("checkpoints")
    world.objects.create(asked)
    ready: Object = {
        "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    node = world.objects.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n0"}, "spec": {}})[
        "metadata"
    ]
    world.objects.update_status(Ref("Node", node.get("namespace", ""), "n0", node["uid"]), ready)
    world.objects.create(training_job(NAME, PODS))
    await world.clock.advance(0.9)  # until the pods run, before the first round of polls
    for pod in world.objects.of_kind("Pod"):
        pods.answers[pod["metadata"]["uid"]] = REPORT
    await world.clock.advance(10)
    job = world.objects.get(JOB)
    assert job["status"]["phase"] == "Running", job["status"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.kubelet.stop(0)
    keys = operator.settings.control_keys_config_map
    return job["metadata"]["uid"], [one for one in cluster.requests if _name(one) != keys]


def _name(request: Request) -> str:
    return request.about.name if isinstance(request.about, Ref) else str(request.about["metadata"]["name"])


# Replay


class Replay:
    """The requests of one gang, sent for many."""

    def __init__(self, plane: ControlPlane, uid: str, requests: list[Request], gangs: int) -> None:
        self.plane, self.uid, self.requests, self.gangs = plane, uid, requests, gangs
        self.jobs: dict[int, Object] = {}
        self.pods: dict[str, str] = {}
        """Uid of each pod by its name."""

    async def run(self) -> dict[str, Any]:
        """Return milliseconds for each gang by kind of request, their sum, and the size of a job's object."""
        spent: defaultdict[str, float] = defaultdict(float)
        counts: defaultdict[str, int] = defaultdict(int)
        async with ApiClient(read_kubeconfig(self.plane.kubeconfig)) as self.api:
            await self._timed(self._post_job)
            for request in self.requests:
                spent[request.name] += await self._timed(partial(self._send, request))
                counts[request.name] += 1
                say(f"{request.name}: {spent[request.name]:.1f} ms in {counts[request.name]}")
            size = len(json.dumps(await self.api.get("TrainingJob", NAMESPACE, NAME)))
        ms = {f"{counts[name]} {name}": round(value, 1) for name, value in spent.items()}
        return {"ms": ms, "sum_ms": round(sum(spent.values()), 1), "object_bytes": size}

    async def _timed(self, act: Callable[[int], Awaitable[None]]) -> float:
        """Act for every gang; return the server's milliseconds of processor time for one."""
        pid = self.plane.api_server.pid
        assert pid is not None
        slots, before = asyncio.Semaphore(AT_ONCE), cpu_s(pid)

        async def one(gang: int) -> None:
            async with slots:
                await act(gang)

        await asyncio.gather(*map(one, range(self.gangs)))
        return (cpu_s(pid) - before) / self.gangs * 1e3

    async def _post_job(self, gang: int) -> None:
        self.jobs[gang] = await self.api.create(training_job(f"gang-{gang:04}", PODS))

    async def _send(self, request: Request, gang: int) -> None:
        about, body = self._of(gang, request.about), self._of(gang, request.body)
        if request.verb == "POST":
            made = await self.api.create({**body, "metadata": {"namespace": NAMESPACE, **body["metadata"]}}, **MANAGER)
            self.pods[made["metadata"]["name"]] = made["metadata"]["uid"]
        elif request.verb == "APPLY":
            path = path_of(about["kind"], NAMESPACE, about["metadata"]["name"])
            await self.api.ask("PATCH", path, body, query={**MANAGER, "force": "true"}, kind="apply-patch+yaml")
        elif request.verb == "PATCH":
            kind, _, name, _ = about
            guarded = {**body, "metadata": {"uid": self.pods[name]}}
            path = path_of(kind, NAMESPACE, name)
            await self.api.ask("PATCH", path, guarded, query=MANAGER, kind="merge-patch+json")
        else:
            await self._put_status(gang, body)

    async def _put_status(self, gang: int, status: Object) -> None:
        job = self.jobs[gang]
        names = ("name", "namespace", "uid", "resourceVersion")
        body = {**job, "metadata": {name: job["metadata"][name] for name in names}, "status": status}
        del body["spec"]
        path = path_of("TrainingJob", NAMESPACE, job["metadata"]["name"], "status")
        self.jobs[gang] = await self.api.ask("PUT", path, body, query=MANAGER)

    def _of(self, gang: int, value: Any) -> Any:
        """The value with the names and the uid of a gang."""
        text = json.dumps(value).replace(NAME, f"gang-{gang:04}").replace(self.uid, self.jobs[gang]["metadata"]["uid"])
        return json.loads(text)


if __name__ == "__main__":
    main()
