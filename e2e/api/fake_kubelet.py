"""A kubelet without containers for the pods of one namespace.

It binds pods (to the node that they are pinned to), reports them Running at a loopback address, and ends those that
are deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import aiohttp

from e2e.api.api_client import ApiClient, ApiRefused, Object
from e2e.api.fake_agents import FakeAgents
from stoker.operator.domain.placement.node_capacity import pinned_node
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.termination_message import SaveReport, TerminationMessage

NODE = "node-1"


class FakeKubelet:
    """The kubelet as an async context manager; it acts while it is open."""

    def __init__(self, api: ApiClient, namespace: str, agents: FakeAgents) -> None:
        self.api = api
        self.namespace = namespace
        self.agents = agents
        self.created: dict[str, str] = {}
        """uid -> name of every pod ever created."""
        self.runs: Callable[[Object], bool] = lambda pod: True
        """The choice of the pods to be started."""
        self.tasks: Callable[[Object], dict[str, Any]] = lambda pod: {
            "task": pod["metadata"]["labels"]["stoker.dev/task"],
            "ok": True,
        }
        """The result of a task pod."""
        self.last_saves: Callable[[Object], list[dict[str, Any]] | None] = lambda pod: None
        """The saves that a running pod reports when it is told to go; None: it reports nothing."""

    async def __aenter__(self) -> FakeKubelet:
        listed = await self.api.ask("GET", f"api/v1/namespaces/{self.namespace}/pods")
        self._loop = asyncio.create_task(self._follow(listed))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.cancel()
        found = (await asyncio.gather(self._loop, return_exceptions=True))[0]
        if error is None and isinstance(found, Exception):
            raise found

    def made(self, role: str) -> list[str]:
        """Return the names of all pods ever made with `role` in their name, in the order of creation.

        A name that appears twice is two pods.
        """
        return [name for name in self.created.values() if role in name]

    async def look_again(self) -> None:
        """Start the pods that may run by now."""
        for pod in (await self._list_again())["items"]:
            await self._handle(pod)

    async def end(self, name: str, cause: Cause, **word: Any) -> None:
        """End the pod's program with a termination message."""
        saves = tuple(
            SaveReport(**{key: save[key] for key in ("id", "folder", "step", "digest", "verified")})
            for save in word.pop("saves", ())
        )
        await self._terminate(
            name, EXIT_CODES[cause], TerminationMessage(cause=cause, saves=saves, **word).encode().decode()
        )

    async def kill(self, name: str) -> None:
        """Kill the pod's container without a termination message."""
        await self._terminate(name, 137, "")

    async def _follow(self, listed: Object) -> None:
        """List and watch pods, and list again after the API server was away."""
        while True:
            for pod in listed["items"]:
                await self._handle(pod)
            try:
                async for kind, pod in self.api.watch("Pod", self.namespace, listed["metadata"]["resourceVersion"]):
                    if kind in ("ADDED", "MODIFIED"):
                        await self._handle(pod)
                    elif kind == "ERROR":
                        break
            except aiohttp.ClientError:
                pass
            listed = await self._list_again()

    async def _list_again(self) -> Object:
        while True:
            try:
                return await self.api.ask("GET", f"api/v1/namespaces/{self.namespace}/pods")
            except (aiohttp.ClientError, ApiRefused):
                await asyncio.sleep(0.05)

    async def _handle(self, pod: Object) -> None:
        metadata, phase = pod["metadata"], pod["status"].get("phase")
        self.created[metadata["uid"]] = metadata["name"]
        try:
            if metadata.get("deletionTimestamp"):
                if phase == "Running" and (saves := self.last_saves(pod)) is not None:
                    step = max((save["step"] for save in saves), default=None)
                    await self.end(metadata["name"], Cause.INTERRUPTED, step=step, saves=saves)
                await self.api.delete("Pod", self.namespace, metadata["name"], gracePeriodSeconds=0)
            elif phase == "Pending" and not pod["spec"].get("schedulingGates") and self.runs(pod):
                await self._start(pod)
        except ApiRefused as refused:
            if refused.code not in (404, 409):
                raise
        except aiohttp.ClientError:
            return

    async def _start(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": {"kind": "Node", "name": pinned_node(pod) or NODE},
            }
            await self.api.ask("POST", f"api/v1/namespaces/{self.namespace}/pods/{name}/binding", binding)
        if pod["metadata"]["labels"].get("stoker.dev/role") == "task":
            result = self.tasks(pod)
            cause = Cause.COMPLETED if result["ok"] else Cause.TASK_FAILED
            word = TerminationMessage(cause=cause, result=result)
            await self._terminate(name, EXIT_CODES[cause], word.encode().decode())
            return
        status = {
            "phase": "Running",
            "podIP": self.agents.address(pod),
            "conditions": [
                {"type": kind, "status": "True"} for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")
            ],
            "containerStatuses": [
                _container({"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}, ready=True)
            ],
        }
        status["podIPs"] = [{"ip": status["podIP"]}]
        await self.api.patch("Pod", self.namespace, name, {"status": status}, "status")

    async def _terminate(self, name: str, code: int, message: str) -> None:
        terminated = {"exitCode": code, "message": message, "reason": "Completed" if code == 0 else "Error"}
        status = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "conditions": [{"type": "Ready", "status": "False", "reason": "PodCompleted"}],
            "containerStatuses": [_container({"terminated": terminated}, ready=False)],
        }
        await self.api.patch("Pod", self.namespace, name, {"status": status}, "status")


def _container(state: Object, *, ready: bool) -> Object:
    return {
        "name": "main",
        "image": "fake",
        "imageID": "",
        "ready": ready,
        "restartCount": 0,
        "started": ready,
        "state": state,
    }
