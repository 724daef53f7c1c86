"""The state of an InferenceDeployment in one word and one line. Pure.

Called by `reconcile` at the end of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.operator.api.inferencedeployment import CanaryStatus, DeploymentPhase, PoolSummary, RolloutStatus
from stoker.operator.domain.conditions import Health
from stoker.operator.domain.pods import ended, exit_of
from stoker.operator.domain.rollout.canary import WAITS
from stoker.operator.domain.waiting import waiting
from stoker.operator.reconcile.enginepool.view import FAILURES_TO_STALL
from stoker.operator.reconcile.inferencedeployment.backends import engine_known
from stoker.operator.reconcile.inferencedeployment.model_choice import ModelChoice, NoModel
from stoker.operator.reconcile.inferencedeployment.rollout import RolloutStep, is_overdue
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView, former_pools, pool_object_name


@dataclass(frozen=True)
class DeploymentState:
    """Health, phase, and the line with the reason why the deployment does not serve in full."""

    health: Health
    phase: DeploymentPhase
    message: str | None = None


def deployment_state(
    view: DeploymentView,
    choice: ModelChoice | NoModel,
    rollout: RolloutStep,
    ready_routers: int,
    pools: tuple[PoolSummary, ...],
) -> DeploymentState:
    """The state as observed: no model, then the rollout, then routers and engines."""
    if isinstance(choice, NoModel) and rollout.target is None:
        return _without_model(choice)
    ready = sum(pool.ready for pool in pools)
    why = _first_message(pools)
    if rollout.status is not None and rollout.status.phase == "RolledBack" and ready_routers and ready:
        return DeploymentState(Health.STALLED, "Serving", _rolled_back(rollout))
    empty = [pool.name for pool in pools if pool.replicas == 0]
    if rollout.status is not None and rollout.status.phase not in ("Completed", "RolledBack"):
        obstacle = _obstacle(choice, rollout, why)
        if rollout.status.canary is not None and len(empty) == len(pools):
            return _scaled_to_zero(view, empty, f"; canary: {obstacle}" if obstacle else "")
        return _rollout_state(view, rollout.status, ready, why, obstacle)
    lost = _lost_pools(view, rollout)
    if lost and not ready:
        return DeploymentState(Health.STALLED, "Failed", _without_pools(lost, rollout))
    if len(empty) == len(pools):  # engines of either role serve alone
        return _scaled_to_zero(view, empty)
    if ready_routers == 0:
        phase: DeploymentPhase = "Degraded" if view.router_status.ready else "Starting"
        return DeploymentState(Health.PROGRESSING, phase, _reason_without_router(view))
    moved = rollout.status is not None and rollout.status.phase == "Completed"
    if (moved and not rollout.whole) or any(pool.ready < pool.replicas for pool in pools):
        return _incomplete_state(view, ready, why)
    if not engine_known(view):
        served = view.deployment.status.phase in ("Serving", "Scaling", "Degraded")
        text = "no router has reached an engine"
        return DeploymentState(Health.PROGRESSING, "Degraded" if served else "Starting", text)
    if isinstance(choice, NoModel):
        return DeploymentState(Health.STALLED if choice.stalled else Health.READY, "Serving", choice.message)
    held = f"spec.rollout.paused holds the update to {rollout.held}" if rollout.held else None
    return DeploymentState(Health.READY, "Serving", held)


def _first_message(pools: tuple[PoolSummary, ...]) -> str | None:
    """What the first pool that has something to say says, under its name where there are others."""
    found = next((pool for pool in pools if pool.message), None)
    if found is None:
        return None
    return found.message if len(pools) == 1 else f"pool {found.name}: {found.message}"


def _without_model(choice: NoModel) -> DeploymentState:
    if choice.stalled:
        return DeploymentState(Health.STALLED, "Failed", choice.message)
    return DeploymentState(Health.PROGRESSING, "WaitingForCheckpoint", choice.message)


def _rollout_state(
    view: DeploymentView, status: RolloutStatus, ready: int, why: str | None, obstacle: str | None
) -> DeploymentState:
    """The state while replicas of the target revision are missing. `why`: what a pool says of its replicas."""
    if is_overdue(view, status):
        limit_s = view.deployment.spec.rollout.progress_deadline_seconds
        text = f"the rollout has made no progress for {limit_s} s{f': {why or obstacle}' if why or obstacle else ''}"
        return DeploymentState(Health.STALLED, "Degraded" if ready else "Failed", text)
    if not ready and (failed := _failed_state(view, why)) is not None:
        return failed
    updating = status.from_revision or any(live.status.ready_replicas for live in former_pools(view))
    text = obstacle or why or "engines are starting"
    return DeploymentState(Health.PROGRESSING, "Updating" if updating else "Starting", text)


def _incomplete_state(view: DeploymentView, ready: int, why: str | None) -> DeploymentState:
    """The state while replicas of the revision that serves are missing: lost, failed, or wanted since then."""
    if not ready:
        return _failed_state(view, why) or DeploymentState(Health.PROGRESSING, "Starting", why)
    degraded = any(live.status.phase == "Degraded" for live in view.pools)
    return DeploymentState(Health.PROGRESSING, "Degraded" if degraded else "Scaling", why)


def _failed_state(view: DeploymentView, why: str | None) -> DeploymentState | None:
    """The state of a deployment without a ready engine, one of whose pools has failed; None: none has."""
    failed = [live for live in view.pools if live.status.failures and not live.status.ready_replicas]
    if not failed:
        return None
    given_up = any(live.status.failures >= FAILURES_TO_STALL for live in failed)
    return DeploymentState(Health.STALLED if given_up else Health.PROGRESSING, "Failed", why)


def _obstacle(choice: ModelChoice | NoModel, rollout: RolloutStep, why: str | None) -> str | None:
    """What keeps the target revision from getting replicas, where that is no replica's own failure.

    A canary that waits for replicas also says what a pool says of them (`why`).
    """
    if isinstance(choice, NoModel):
        return choice.message
    status = rollout.status or RolloutStatus()
    if status.canary is not None and status.canary.phase == "Failed":
        return f"revision {rollout.target} is given up: {_given_up(status.canary, rollout)}"
    if status.canary is not None and status.canary.message:
        waits = status.canary.reason == WAITS and why
        return f"{status.canary.message}: {why}" if waits else status.canary.message
    return "spec.rollout.paused holds the rollout" if status.phase == "Paused" else None


def _rolled_back(rollout: RolloutStep) -> str:
    """What became of the canary; the old revision serves on."""
    canary = rollout.status.canary if rollout.status is not None else None
    if canary is None:
        return f"revision {rollout.target} was rolled back; {rollout.current} serves"
    return f"revision {rollout.target} was rolled back: {_given_up(canary, rollout)}"


def _given_up(canary: CanaryStatus, rollout: RolloutStep) -> str:
    """Why a canary ended without promotion, and which revisions serve."""
    keeps = f"; {rollout.target} keeps {canary.percent} % until more replicas of {rollout.current} are ready"
    kept = keeps if canary.percent else ""
    return f"{canary.reason}: {canary.message}; {rollout.current} serves{kept}"


def _lost_pools(view: DeploymentView, rollout: RolloutStep) -> list[str]:
    """Pools of a deployment that was rolled back whose EnginePools are gone and cannot be made again."""
    if rollout.status is None or rollout.status.phase != "RolledBack":
        return []
    made = {body["metadata"]["name"] for body in rollout.create}
    names = [pool_object_name(view.deployment, pool) for pool in view.deployment.spec.pools]
    return [] if former_pools(view) else sorted({*names} - made - {live.metadata.name for live in view.pools})


def _without_pools(lost: list[str], rollout: RolloutStep) -> str:
    """The line about EnginePools that were deleted by hand, and what to do."""
    return (
        f"EnginePool {', '.join(lost)} was deleted, and with it revision {rollout.current}, which neither spec nor a "
        f"Checkpoint describes any more; set spec.rollout.promote to {rollout.target}, or edit the spec"
    )


def _scaled_to_zero(view: DeploymentView, pools: list[str], more: str = "") -> DeploymentState:
    """Not ready, because no engine can answer; nothing is wrong either. `more` is the end of the message."""
    remaining = sum(not ended(pod) for pod in view.engines)
    rest = f"; draining engines: {remaining}" if remaining else ""
    text = f"scaled to zero: no replicas in {'pool' if len(pools) == 1 else 'pools'} {', '.join(pools)}{rest}{more}"
    return DeploymentState(Health.PROGRESSING if remaining else Health.IDLE, "ScaledToZero", text)


def _reason_without_router(view: DeploymentView) -> str:
    """The line with the first router's reason to wait, else with how one ended."""
    held = [known.line for pod in view.routers if not ended(pod) and (known := waiting(pod)) is not None]
    failed = [exit_of(pod) for pod in view.routers if ended(pod)]
    why = [*held, *(f"{exit_.cause}: {exit_.detail}".rstrip(": ") for exit_ in failed)]
    return f"no router is ready: {why[0]}" if why else "no router is ready"
