"""The history of a run's metrics: from its log, read by the agent or by a task, else from the logs of its pods."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query

from stoker.gateway.cluster.interface import JOB, POD, ApiError, Cluster, Object, Target
from stoker.gateway.cluster.whole_answer import start_of
from stoker.gateway.domain.log_lines import metric_samples
from stoker.gateway.domain.metric_task import AgentPlace, Span, agent_of, live, task_of, why_failed
from stoker.gateway.domain.pod_attempts import rank_of
from stoker.gateway.http.caller import Call, Caller, Namespace, ResourceId, find, one_namespace
from stoker.gateway.http.errors import ERRORS
from stoker.gateway.http.pod_logs import lines_of, pods_of
from stoker.gateway.models import MetricHistory, MetricPoint
from stoker.gateway.problem import wrong_field
from stoker.pod.log_position import LogRequest
from stoker.pod.metric_log import COLUMNS, Sample
from stoker.pod.metric_reader import MOST, BrokenHistory, History, parse_lines
from stoker.pod.metric_thinning import FEWEST, thinned

STEP_LINES = 1_000_000
MAX_ANSWER_BYTES = 16 << 20
AGENT_S = 30.0
LOOK_S = 0.25
LARGEST_STEP = 2**53
Source = Literal["agent", "task", "logs"]


class Unread(Exception):
    """The log was not read; the message says why."""


def metric_history_routes() -> APIRouter:
    """Build the route."""
    router = APIRouter(prefix="/v1/training/jobs/{job_id}", tags=["training"], responses=ERRORS)
    router.add_api_route("/metrics", history, methods=["GET"], response_model=MetricHistory)
    return router


async def history(
    job_id: ResourceId,
    call: Caller,
    namespace: Namespace = None,
    after_step: Annotated[int, Query(ge=0, le=LARGEST_STEP, description="Only later steps")] = 0,
    until_step: Annotated[int | None, Query(ge=0, le=LARGEST_STEP, description="No later steps")] = None,
    max_points: Annotated[int, Query(ge=FEWEST, le=MOST, description="Of more, extremes and ends are kept")] = MOST,
) -> MetricHistory:
    """Read the metrics of a run by step, from its log; where that cannot be read, from the logs of its pods."""
    if until_step is not None and until_step < after_step:
        raise wrong_field("query.until_step", f"{until_step} is before after_step {after_step}")
    job = await find(call, JOB, one_namespace(call, namespace), job_id)
    pods = await pods_of(call, job)
    span = Span(after_step, until_step)
    source: Source
    try:
        source, found = await _from_the_log(call, job, pods, span, max_points)
        missing = _not_covered(job, found, span)
    except Unread as why:
        source, found = "logs", await _from_pods(call.cluster, pods, span)
        missing = _missing_in_pods(job, found, pods, span, str(why))
    points = [_point(sample) for sample in thinned(found.points, max_points)]
    uid = job["metadata"]["uid"]
    return MetricHistory(job_id=uid, points=points, complete=not missing, missing=missing, source=source)


async def _from_the_log(
    call: Call, job: Object, pods: Sequence[Object], span: Span, max_points: int
) -> tuple[Source, History]:
    """Ask the agent, or where every pod has ended a task. Raises Unread."""
    agent = agent_of(job, pods)
    if agent is not None:
        return "agent", await _ask_agent(call.cluster, agent, span, max_points)
    if live(pods):
        raise Unread("the pod that writes the log of metrics does not run yet")
    task = task_of(job, span)
    if task is None:
        raise Unread("the log of metrics is on no claim of the job")
    return "task", await _run_task(call, task, span)


async def _ask_agent(cluster: Cluster, agent: AgentPlace, span: Span, max_points: int) -> History:
    target = Target("pods", agent.namespace, agent.pod, agent.port)
    try:
        async with asyncio.timeout(AGENT_S):
            answer = await cluster.relay(target, "GET", agent.path(span, max_points))
            text = (await start_of(answer, MAX_ANSWER_BYTES)).decode(errors="replace")
        found = json.loads(text)
        if answer.status != 200:
            raise Unread(f"{agent.pod}: {found.get('error') or found.get('message')}")
        points = [_sample(point) for point in found["points"]]
        return History(points, int(found["unreadable"]))
    except (ApiError, TimeoutError) as error:
        raise Unread(f"{agent.pod}: {error or 'no answer'}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unread(f"{agent.pod}: it serves no history of metrics") from error


async def _run_task(call: Call, task: Object, span: Span) -> History:
    """Make the task unless it is there, wait for its end, read its output. Raises Unread."""
    cluster, metadata = call.cluster, task["metadata"]
    try:
        try:
            pod = await cluster.get(POD, metadata["namespace"], metadata["name"])
        except ApiError as error:
            if error.status != 404:
                raise
            pod = await _created(cluster, task)
        pod = await _ended(cluster, pod, call.gateway.config.metrics_task_wait_s)
        return await _output(cluster, pod, span)
    except ApiError as error:
        raise Unread(f"task {metadata['name']}: {error}") from error


async def _created(cluster: Cluster, task: Object) -> Object:
    try:
        return await cluster.create(POD, task["metadata"]["namespace"], task)
    except ApiError as error:
        if error.status != 409:
            raise
        return await cluster.get(POD, task["metadata"]["namespace"], task["metadata"]["name"])


async def _ended(cluster: Cluster, pod: Object, wait_s: float) -> Object:
    """Wait for the end of a task. Raises Unread."""
    until = time.monotonic() + wait_s
    metadata = pod["metadata"]
    while (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed"):
        if time.monotonic() >= until:
            raise Unread(f"task {metadata['name']} still reads the log of metrics ({why_failed(pod)}): ask again")
        await asyncio.sleep(LOOK_S)
        pod = await cluster.get(POD, metadata["namespace"], metadata["name"])
    return pod


async def _output(cluster: Cluster, pod: Object, span: Span) -> History:
    """The points that a task printed. A task that failed or was asked for a part is deleted. Raises Unread."""
    name, ended_well = pod["metadata"]["name"], pod["status"]["phase"] == "Succeeded"
    keep = False
    try:
        if not ended_well:
            raise Unread(f"task {name} failed: {why_failed(pod)}")
        found = parse_lines(line.text for line in await lines_of(cluster, pod, LogRequest()))
        keep = span.whole
        return found
    except BrokenHistory as error:
        raise Unread(f"task {name}: {error}") from error
    finally:
        if not keep:
            await _delete(cluster, pod)


async def _delete(cluster: Cluster, pod: Object) -> None:
    metadata = pod["metadata"]
    try:
        await cluster.delete(POD, metadata["namespace"], metadata["name"], uid=metadata["uid"])
    except ApiError as error:
        if error.status not in (403, 404, 409):
            raise


async def _from_pods(cluster: Cluster, pods: Sequence[Object], span: Span) -> History:
    """What the first pod of each attempt logged, of those that are still there."""
    leading = [pod for pod in pods if rank_of(pod) == 0]
    lines = [line.text for pod in leading for line in await lines_of(cluster, pod, LogRequest(tail=STEP_LINES))]
    return History([sample for sample in metric_samples(lines) if span.has(sample.step)], 0)


def _not_covered(job: Object, found: History, span: Span) -> str:
    """Explain what a log does not cover; empty when it covers the span."""
    if found.unreadable:
        return f"{found.unreadable} lines of the log cannot be read"
    first = found.points[0].step if found.points else None
    every, reached = _every(job), _reached(job)
    if not span.whole or (first is None and not reached) or (first is not None and first <= every):
        return ""
    return f"steps 1 to {(first or reached + 1) - 1}: the run began at a checkpoint, or its log was removed"


def _missing_in_pods(job: Object, found: History, pods: Sequence[Object], span: Span, why: str) -> str:
    """Explain which steps have no metrics; empty when all have."""
    asked = _reached(job) if span.until is None else min(_reached(job), span.until)
    last = found.points[0].step - 1 if found.points else asked
    if last < span.after + _every(job):
        return ""
    gone = "the log of the job's pods has no line about them" if pods else "the pods that logged them are gone"
    return f"steps {span.after + 1} to {last}: {gone}; {why}"


def _every(job: Object) -> int:
    return int((job["spec"].get("logging") or {}).get("everySteps") or 1)


def _reached(job: Object) -> int:
    return int(((job.get("status") or {}).get("progress") or {}).get("step") or 0)


def _sample(point: Object) -> Sample:
    values = {name: float(point[name]) for name in COLUMNS if point.get(name) is not None}
    return Sample(int(point["step"]), values)


def _point(sample: Sample) -> MetricPoint:
    return MetricPoint(step=sample.step, **sample.values)
