"""The metrics of a job's run on a cluster: asked from its agent, or read by a task pod, as the gateway does.

`KubePaths` is the seam: an API server, or the supervisor of the embedded cluster, which serves the same paths.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

from stoker.gateway.domain.metric_task import AgentPlace, Span, agent_of, live, task_of, why_failed
from stoker.operator.domain.labels import JOB_UID, ROLE
from stoker.pod.metric_log import Sample
from stoker.pod.metric_reader import MOST, BrokenHistory, History, parse_lines

LOOK_S = 0.25
WAIT_S = 120.0


class PathError(Exception):
    """The cluster refused a path; `status` is its HTTP code, 0 when it did not answer."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NoHistory(Exception):
    """The metrics of a run cannot be read; the message says why."""


class KubePaths(Protocol):
    """Requests to paths of the Kubernetes API. Every call may raise a PathError."""

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        """Send a request and return the body of the answer."""


def run_history(
    cluster: KubePaths, namespace: str, name: str, span: Span, sleep: Callable[[float], None] = time.sleep
) -> History:
    """Read the metrics of a job.

    Raises:
        NoHistory: nothing has them.
        PathError: the job cannot be read.
    """
    root = f"/api/v1/namespaces/{namespace}/pods"
    job = json.loads(cluster.ask("GET", f"/apis/stoker.dev/v1alpha1/namespaces/{namespace}/trainingjobs/{name}"))
    selector = f"{JOB_UID}={job['metadata']['uid']},{ROLE}=trainer"
    pods = json.loads(cluster.ask("GET", f"{root}?labelSelector={selector}"))["items"]
    agent = agent_of(job, pods)
    if agent is not None:
        return _from_agent(cluster, root, agent, span)
    if live(pods):
        raise NoHistory(f"job {name}: the pod that writes the log of metrics does not run yet")
    task = task_of(job, span)
    if task is None:
        raise NoHistory(f"job {name} has no log of metrics on a claim: it has not run, or logging.jsonl is elsewhere")
    return _from_task(cluster, root, task, span, sleep)


def _from_agent(cluster: KubePaths, root: str, agent: AgentPlace, span: Span) -> History:
    try:
        text = cluster.ask("GET", f"{root}/{agent.pod}:{agent.port}/proxy{agent.path(span, MOST)}")
        found = json.loads(text)
        points = [Sample(one.pop("step"), one) for one in found["points"]]
        return History(points, found["unreadable"])
    except PathError as error:
        raise NoHistory(f"pod {agent.pod}: {error}") from error
    except (ValueError, KeyError) as error:
        raise NoHistory(f"pod {agent.pod} serves no history of metrics") from error


def _from_task(
    cluster: KubePaths, root: str, task: dict[str, Any], span: Span, sleep: Callable[[float], None]
) -> History:
    path = f"{root}/{task['metadata']['name']}"
    pod = _found(cluster, path)
    if pod is not None and pod["status"].get("phase") == "Failed":
        _delete(cluster, path)  # of an earlier question
        pod = None
    if pod is None:
        cluster.ask("POST", root, task)
    keep = False
    try:
        pod = _ended(cluster, path, sleep)
        if pod["status"]["phase"] == "Failed":
            raise NoHistory(f"task {pod['metadata']['name']} failed: {why_failed(pod)}")
        found = parse_lines(cluster.ask("GET", f"{path}/log").splitlines())
        keep = span.whole  # the next question has its answer
        return found
    except BrokenHistory as error:
        raise NoHistory(f"task {task['metadata']['name']}: {error}") from error
    finally:
        if not keep:
            _delete(cluster, path)


def _ended(cluster: KubePaths, path: str, sleep: Callable[[float], None]) -> dict[str, Any]:
    """Wait for the end of the task."""
    pod: dict[str, Any] = {}
    for _ in range(int(WAIT_S / LOOK_S)):
        pod = json.loads(cluster.ask("GET", path))
        if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
            return pod
        sleep(LOOK_S)
    raise NoHistory(f"task {pod['metadata']['name']} has not ended within {WAIT_S:g} s: {why_failed(pod)}")


def _found(cluster: KubePaths, path: str) -> dict[str, Any] | None:
    try:
        pod: dict[str, Any] = {"status": {}, **json.loads(cluster.ask("GET", path))}
    except PathError as error:
        if error.status != 404:
            raise
        return None
    return pod


def _delete(cluster: KubePaths, path: str) -> None:
    with contextlib.suppress(PathError):
        cluster.ask("DELETE", path)
