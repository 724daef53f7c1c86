"""Prefill and decode pools of a deployment: the key that they share, and whether requests are split now. Pure.

A deployment never stops because a pair is missing: engines of either role serve whole requests alone. The conditions
say which of the two happens, and why.

Called by `reconcile` and `status`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from stoker.operator.api.pool import Role
from stoker.operator.domain.conditions import Condition
from stoker.operator.domain.lent_pods import is_lent, served_pool
from stoker.operator.domain.plan import Object
from stoker.operator.domain.pods import is_owned, is_ready
from stoker.operator.reconcile.enginepool.replica import draining, revision_of
from stoker.operator.reconcile.inferencedeployment.rollout import RolloutStep
from stoker.operator.reconcile.inferencedeployment.view import DeploymentView
from stoker.operator.render.transfer_key import transfer_secret, transfer_secret_name

DISAGGREGATED = "Disaggregated"
"""Condition of a deployment with prefill and decode pools: whether requests can be split now."""
INCOMPATIBLE = "PoolsIncompatible"
"""Condition while engines of one revision have cache blocks that the others cannot use."""
Report = Mapping[str, Any]


def missing_secrets(view: DeploymentView, rollout: RolloutStep) -> tuple[Object, ...]:
    """The Secret with the pools' key, until it exists.

    An operator that cannot see Secrets asks for it with each change of a pool: before the first engine exists, too.
    """
    if not has_roles(view):
        return ()
    if view.settings.sees_secrets:
        name = transfer_secret_name(view.deployment)
        missing = not any(found["metadata"]["name"] == name for found in view.seen.of_kind("Secret"))
    else:
        missing = bool(rollout.create or rollout.apply)
    return (transfer_secret(view.deployment, view.seen.resource),) if missing else ()


def has_roles(view: DeploymentView) -> bool:
    return any(pool.role != "colocated" for pool in view.deployment.spec.pools)


def disaggregation_conditions(view: DeploymentView) -> tuple[Condition, ...]:
    """`Disaggregated` and `PoolsIncompatible`; none for a deployment without roles."""
    if not has_roles(view):
        return tuple(Condition(name, None, "Colocated") for name in (DISAGGREGATED, INCOMPATIBLE))
    ready = [pod for pod in view.engines if is_ready(pod) and not draining(pod)]
    engines = {role: [pod for pod in ready if role_of_engine(view, pod) == role] for role in ("prefill", "decode")}
    difference = _difference(view, engines["prefill"], engines["decode"])
    incompatible = Condition(INCOMPATIBLE, True if difference else None, "FingerprintsDiffer", difference or "")
    return _disaggregated(view, engines, difference), incompatible


def role_of_engine(view: DeploymentView, pod: Object) -> Role:
    """The role of the pool that the pod serves, which is its own unless it is lent."""
    owners = (pool for pool in view.pools if is_owned(pod, pool.metadata.uid))
    own: Role = next((pool.spec.revisions[0].template.role for pool in owners), "colocated")
    served = (pool.role for pool in view.deployment.spec.pools if is_lent(pod) and pool.name == served_pool(pod))
    return next(served, own)


def _disaggregated(view: DeploymentView, engines: Mapping[str, list[Object]], difference: str | None) -> Condition:
    """Whether an engine of each role is ready, has a common revision with one of the other, and offers its blocks."""
    if not any(engines.values()):
        unmet = _unmet(view, view.engines)
        return Condition(DISAGGREGATED, False, "NoEngine", "no engine is ready" + (f": {unmet}" if unmet else ""))
    for role, instead in (("prefill", "decode engines compute prompts"), ("decode", "prefill engines answer requests")):
        if not engines[role]:
            reason = "NoPrefillEngine" if role == "prefill" else "NoDecodeEngine"
            unmet = _unmet(view, view.engines)
            why = f"; {unmet}" if unmet else ""
            return Condition(
                DISAGGREGATED, False, reason, f"no {role} engine is ready: {instead} themselves, as if colocated{why}"
            )
    if unmet := _unmet(view, (*engines["prefill"], *engines["decode"])):
        return Condition(DISAGGREGATED, False, "TransportUnmet", unmet)
    common = _revisions(engines["prefill"]) & _revisions(engines["decode"])
    if not common:
        text = "the ready prefill and decode engines have no common revision: requests are served as if colocated"
        return Condition(DISAGGREGATED, False, "NoCommonRevision", text)
    if difference:
        return Condition(DISAGGREGATED, False, INCOMPATIBLE, difference)
    counts = " and ".join(f"{len(engines[role])} {role}" for role in ("prefill", "decode"))
    if avoided := _avoided(view, engines["decode"]):
        return Condition(DISAGGREGATED, True, "PeerAvoided", f"ready engines: {counts}; {avoided}")
    return Condition(DISAGGREGATED, True, "Paired", f"ready engines: {counts}")


def _avoided(view: DeploymentView, decode: Iterable[Object]) -> str:
    """The first prefill engine that a decode engine does not call for a while, and why."""
    for pod in decode:
        found = _transfer(view, pod).get("avoided")
        if isinstance(found, Mapping) and found:
            endpoint, why = min(found.items())
            return f"{pod['metadata']['name']} computes prompts itself instead of asking {endpoint}: {why}"
    return ""


def _unmet(view: DeploymentView, pods: Iterable[Object]) -> str | None:
    """The first engine whose way to others is not what `engine.transfer.require` asks for."""
    for pod in pods:
        if unmet := _transfer(view, pod).get("unmet"):
            return f"{pod['metadata']['name']} has no transport as engine.transfer.require asks: {unmet}"
    return None


def _difference(view: DeploymentView, prefill: Iterable[Object], decode: Iterable[Object]) -> str | None:
    """How the engines of one revision differ, if none of one role fits one of the other."""
    others = list(decode)
    text = None
    for one in prefill:
        for other in others:
            prints = [_transfer(view, pod).get("fingerprint") for pod in (one, other)]
            if revision_of(one) != revision_of(other) or None in prints:
                continue
            if prints[0] == prints[1]:
                return None
            names = " and ".join(pod["metadata"]["name"] for pod in (one, other))
            text = f"{names} cannot exchange cache blocks: {_differs(view, one, other)}; served as if colocated"
    return text


def _differs(view: DeploymentView, one: Object, other: Object) -> str:
    """The first fact in which two engines differ; their fingerprints where they tell no facts."""
    mine, theirs = _transfer(view, one), _transfer(view, other)
    facts, others = mine.get("facts") or {}, theirs.get("facts") or {}
    for name in facts:
        if name in others and facts[name] != others[name]:
            return f"{name} is {str(facts[name])[:12]} and {str(others[name])[:12]}"
    return f"transfer.fingerprint is {str(mine.get('fingerprint'))[:12]} and {str(theirs.get('fingerprint'))[:12]}"


def _transfer(view: DeploymentView, pod: Object) -> Report:
    """The section `transfer` of an engine's `/status`; empty while it has not reported one."""
    report = view.seen.reports.get(pod["metadata"]["uid"]) or {}
    found = report.get("transfer")
    return found if isinstance(found, Mapping) else {}


def _revisions(pods: Iterable[Object]) -> set[str]:
    return {name for pod in pods if (name := revision_of(pod))}
