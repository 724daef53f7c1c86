"""One pass over an InferenceDeployment: choose the model, move the pools to it, keep the routers. Pure.

Called by the loop's workers through `service/reconcilers`.
"""

from __future__ import annotations

from datetime import datetime

from stoker.operator.domain.conditions import Condition, Health
from stoker.operator.domain.plan import Observed, Plan
from stoker.operator.domain.settings import Settings
from stoker.operator.reconcile.inferencedeployment.backends import router_calls, wanted_snapshot
from stoker.operator.reconcile.inferencedeployment.disaggregation import missing_secrets
from stoker.operator.reconcile.inferencedeployment.model_choice import ModelChoice, NoModel, choose_model
from stoker.operator.reconcile.inferencedeployment.outcome import DeploymentOutcome
from stoker.operator.reconcile.inferencedeployment.phase import deployment_state
from stoker.operator.reconcile.inferencedeployment.role_flips import plan_flips
from stoker.operator.reconcile.inferencedeployment.rollout import plan_rollout, until_deadline_s
from stoker.operator.reconcile.inferencedeployment.routers import plan_routers
from stoker.operator.reconcile.inferencedeployment.status import derive_status, pool_summaries
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, deployment_view

ROUTER_RETRY_S = 1.0


def reconcile_inferencedeployment(seen: Observed, settings: Settings, now: datetime) -> Plan:
    """The next changes; a converged deployment gives an empty plan."""
    view = deployment_view(seen, settings, now)
    if view.deployment.deleting:
        return derive_status(view, DeploymentOutcome())  # the garbage collector removes all children with their owner
    return derive_status(view, _reject_spec(view) if view.intent.never_accepted else _keep_serving(view))


def _reject_spec(view: DeploymentView) -> DeploymentOutcome:
    """Nothing is made of a spec that was never accepted."""
    return DeploymentOutcome(health=Health.STALLED, reason="NotSupported", message=view.intent.text)


def _keep_serving(view: DeploymentView) -> DeploymentOutcome:
    choice = choose_model(view)
    rollout = plan_rollout(view, choice)
    wanted = wanted_snapshot(view, rollout.status, rollout.current)
    routers = plan_routers(view, wanted)
    calls = router_calls(view, wanted)
    waits = (
        ROUTER_RETRY_S if calls else None,
        routers.requeue_after_s,
        until_deadline_s(view, rollout),
        rollout.requeue_after_s,
    )
    state = deployment_state(view, choice, rollout, routers.status.ready, pool_summaries(view))
    return DeploymentOutcome(
        health=state.health,
        phase=state.phase,
        reason=state.phase,
        message=state.message,
        conditions=_own_conditions(choice, routers.status.ready),
        revisions=rollout.revisions,
        current_revision=rollout.current,
        rollout=rollout.status,
        router=routers.status,
        plan=Plan(
            generate=missing_secrets(view, rollout),
            create=(*rollout.create, *routers.create),
            apply=(*rollout.apply, *routers.apply),
            patch=plan_flips(view),
            scale=rollout.scale,
            delete=(*rollout.delete, *routers.delete),
            calls=calls,
            events=rollout.events,
            requeue_after_s=min((wait for wait in waits if wait is not None), default=None),
        ),
    )


def _own_conditions(choice: ModelChoice | NoModel, ready_routers: int) -> tuple[Condition, ...]:
    if isinstance(choice, NoModel):
        resolved = Condition("ModelResolved", False, choice.reason, choice.message)
    else:
        name = choice.checkpoint.name if choice.checkpoint else choice.source.path
        resolved = Condition("ModelResolved", True, "Resolved", name)
    reason = "RoutersReady" if ready_routers else "NoRouterReady"
    return resolved, Condition("RouterReady", ready_routers > 0, reason, f"ready routers: {ready_routers}")
