"""The eval gates of a canary: one task for each before the first share, and the verdicts from their results. Pure.

Called by `canary` for the tasks of the present revision, and by `rollout` for tasks that nothing needs any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.operator.api.rollout import EvalGate
from stoker.operator.domain.labels import REVISION, TASK, TASK_TRY
from stoker.operator.domain.plan import Object, Ref
from stoker.operator.domain.pods import ended, exit_of, is_ready, label, label_number, ref_of
from stoker.operator.domain.recovery import MAX_TASK_TRIES
from stoker.operator.domain.rollout.gates import EvalLimits, GateResult, judge_eval, not_evaluated
from stoker.operator.reconcile.enginepool.replica import draining, leaving, revision_of
from stoker.operator.reconcile.inferencedeployment.endpoints import own_names, revision_api_keys, revision_names
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView
from stoker.operator.render.engine import engine_url
from stoker.operator.render.evaluation import EVAL, GATE, AskedEngine, eval_pod
from stoker.pod.causes import Cause


@dataclass(frozen=True)
class Evaluation:
    """The verdicts so far, and the tasks to make."""

    results: tuple[GateResult, ...] = ()
    create: tuple[Object, ...] = ()


def evaluate_gates(view: DeploymentView, gates: tuple[EvalGate, ...], current: str, target: str) -> Evaluation:
    """One verdict for each gate; a task is made where there is none yet, and again when it died."""
    found = [_evaluate(view, gate, current, target) for gate in gates]
    return Evaluation(tuple(result for result, _ in found), tuple(pod for _, pod in found if pod is not None))


def stale_tasks(view: DeploymentView, revision: str | None) -> tuple[Ref, ...]:
    """Tasks of other revisions than `revision`; None: of every one."""
    return tuple(ref_of(pod) for pod in _tasks(view) if label(pod, REVISION) != revision and not leaving(pod))


def _evaluate(view: DeploymentView, gate: EvalGate, current: str, target: str) -> tuple[GateResult, Object | None]:
    mine = [pod for pod in _tasks(view) if (label(pod, REVISION), label(pod, GATE)) == (target, gate.name)]
    for pod in mine:
        message = exit_of(pod).message if ended(pod) else None
        if message is not None and message.cause is Cause.COMPLETED and message.result:
            return judge_eval(_limits(gate), message.result), None
    failed = [pod for pod in mine if ended(pod) and not exit_of(pod).disrupted]
    if len(failed) >= MAX_TASK_TRIES:
        return not_evaluated(
            gate.name, f"its task failed {len(failed)} times: {exit_of(failed[-1]).detail}", over=True
        ), None
    if any(not ended(pod) for pod in mine):
        return not_evaluated(gate.name, "its task is under way"), None
    new, old = _engine(view, target), _engine(view, current)
    if new is None or old is None:
        return not_evaluated(gate.name, "it waits for an engine of each revision"), None
    number = 1 + max((label_number(pod, TASK_TRY) for pod in mine), default=-1)
    pod = eval_pod(
        view.deployment, view.seen.resource, gate, target, number,
        new=_asked(view, new, target), old=_asked(view, old, current), settings=view.settings,
    )  # fmt: skip
    return not_evaluated(gate.name, "its task begins"), pod


def _tasks(view: DeploymentView) -> list[Object]:
    return [pod for pod in view.tasks if label(pod, TASK) == EVAL]


def _engine(view: DeploymentView, revision: str) -> Object | None:
    """A Ready engine of the revision."""
    return next(
        (pod for pod in view.engines if revision_of(pod) == revision and is_ready(pod) and not draining(pod)), None
    )


def _asked(view: DeploymentView, engine: Object, revision: str) -> AskedEngine:
    names = revision_names(view, revision) or own_names(view.deployment)
    url, keys = engine_url(engine, view.settings.engine_port), revision_api_keys(view, revision)
    return AskedEngine(url, names[0], keys)


def _limits(gate: EvalGate) -> EvalLimits:
    drop, divergence = gate.max_drop, gate.max_divergence
    return EvalLimits(
        gate.name,
        float(gate.min_score),
        float(drop) if drop is not None else None,
        float(divergence) if divergence is not None else None,
    )
