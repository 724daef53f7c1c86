"""The programs in fake pods, as the operator reaches them over HTTP: `/status` and the control calls.

One server answers for all pods and identifies a pod by its loopback address.
"""

from __future__ import annotations

import itertools
import json
import socket
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from aiohttp import web

from stoker.operator.domain.plan import Object
from stoker.pod.writer import writer_of

Report = dict[str, Any]
"""The JSON of a `/status`."""

TOTAL_STEPS = 100
SAVED_STEP = 50


class FakeAgents:
    """The server of all fake programs, an async context manager.

    `say` replaces the report of one pod's program.
    """

    def __init__(self) -> None:
        self.port = 0
        self.calls: list[tuple[str, str, Report]] = []
        """Control calls: pod name, path, body."""
        self.on_call: Callable[[Object, str, Report], Report] = lambda pod, path, body: {}
        self.polls = 0
        self._pods: dict[str, Object] = {}
        self._said: dict[str, Report] = {}
        self._snapshots: dict[str, Report] = {}
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> FakeAgents:
        self._runner = web.ServerRunner(web.Server(self._answer, access_log=None), shutdown_timeout=0.1)
        await self._runner.setup()
        await web.SockSite(self._runner, _loopback_socket()).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    def address(self, pod: Object) -> str:
        """Reserve a loopback address for a pod; its program answers requests to it."""
        number = next(self._numbers)
        address = f"127.{64 + number // 62500}.{number // 250 % 250}.{1 + number % 250}"
        self._pods[address] = pod
        return address

    def say(self, pod_name: str, report: Report) -> None:
        """Set the report that the pod's program gives from now on."""
        self._said[pod_name] = report

    def hush(self, pod_name: str) -> None:
        self._said.pop(pod_name, None)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        pod = self._pods.get(request.transport.get_extra_info("sockname")[0])
        if pod is None:
            return web.Response(status=404)
        if request.method == "GET":
            self.polls += 1
            return web.json_response(self._report(pod))
        body = json.loads(await request.read())
        self.calls.append((pod["metadata"]["name"], request.path, body))
        if request.path == "/backends":
            self._snapshots[pod["metadata"]["uid"]] = body
        return web.json_response(self.on_call(pod, request.path, body))

    def _report(self, pod: Object) -> Report:
        metadata = pod["metadata"]
        if metadata["name"] in self._said:
            return self._said[metadata["name"]]
        role = metadata["labels"]["stoker.dev/role"]
        if role == "engine":
            return {
                "program": "engine",
                "pod_uid": metadata["uid"],
                "phase": "Serving",
                "message": "",
                "running": 0,
                "waiting": 0,
            }
        if role == "router":
            return self._router(metadata["uid"])
        return training(metadata["labels"], step=10)

    def _router(self, uid: str) -> Report:
        taken = self._snapshots.get(uid, {"version": 0, "backends": []})
        backends = [{**backend, "healthy": True, "pending": 0} for backend in taken["backends"]]
        return {"program": "router", "pod_uid": uid, "snapshot_version": taken["version"], "backends": backends}


def training(labels: Mapping[str, str], *, step: int, saves: tuple[int, ...] = (), phase: str = "Training") -> Report:
    """Return the report of an agent whose gang trains."""
    uid, attempt = labels["stoker.dev/job-uid"], int(labels["stoker.dev/attempt"])
    return {
        "program": "trainer",
        "attempt": attempt,
        "phase": phase,
        "message": "",
        "step": step,
        "total_steps": TOTAL_STEPS,
        "loss": 2.5,
        "saves": [saved(uid, attempt, number) for number in saves],
        "requests": {},
    }


def saved(uid: str, attempt: int, step: int, *, verified: bool | None = True, id_: str = "") -> Report:
    """Return one committed save for a report."""
    folder = f"step-{step:08d}.{writer_of(uid, attempt)}"
    return {
        "id": id_ or folder,
        "folder": folder,
        "step": step,
        "digest": f"blake3:{step:064x}",
        "verified": verified,
        "state": "Committed",
        "loss": 2.0,
        "bytes": 10,
    }


def _loopback_socket() -> socket.socket:
    """Open a socket that listens on every loopback address and on no other."""
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
    listening.bind(("0.0.0.0", 0))
    listening.listen(1024)
    return listening
