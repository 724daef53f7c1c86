"""The observation of a resource, and the resources that an object concerns. Pure: reads the store, never the cluster.

Every kind observes its owned children and whatever its spec and status name. The tables below add what is neither: a
TrainingJob's Checkpoints (not owned, so that deleting a job deletes no data), the routers of an EnginePool's
deployment, the users of a Checkpoint.

Called by the loop's workers before each pass, and for each change to queue the keys it concerns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from stoker.operator.cluster.kinds import OURS
from stoker.operator.domain.labels import CHECKPOINT_UID, DEPLOYMENT, DEPLOYMENT_UID, EXPIRED, JOB, JOB_UID, ROLE
from stoker.operator.domain.lost_nodes import NodeLoss
from stoker.operator.domain.plan import Key, Object, Observed, Report
from stoker.operator.domain.references import references
from stoker.operator.domain.retention import takes_place
from stoker.operator.domain.start_validation import start_validation
from stoker.operator.loop.lost_pods import mark_lost
from stoker.operator.loop.store import Store, key_of


def observe(
    store: Store,
    key: Key,
    now_s: float,
    *,
    keys_config_map: str = "stoker-control-keys",
    losses: NodeLoss | None = None,
) -> Observed | None:
    """Everything that the reconcile of `key` may look at, or None when the resource is gone.

    Args:
        now_s: monotonic time, for facts that expire.
        losses: lost and silent nodes; pods of lost ones have failed in the observation.

    Objects of a kind are in the order of their names, each once.
    """
    resource = store.get(key)
    if resource is None:
        return None
    around: dict[Key, Object] = {}
    for found in _around(store, resource, keys_config_map):
        around[key_of(found)] = found
    around.pop(key, None)
    seen = Observed(
        resource,
        _by_kind(around.values()),
        _reports(store, around.values()),
        namespace_terminating=store.is_terminating(key.namespace, now_s),
        refusal=store.refusal(key),
    )
    return mark_lost(seen, losses or NodeLoss())


def interested(store: Store, changed: Object) -> set[Key]:
    """The resources that observe `changed`, so that they need a pass."""
    if changed["kind"] == "Node":
        return {key for pod in store.referring_to(key_of(changed)) for key in interested(store, pod)}
    keys = {*_owners(changed), *_labelled(changed), *_both_ways(store, changed)}
    if changed["kind"] in OURS:
        keys.add(key_of(changed))
    if changed["kind"] == "Checkpoint":
        job = Key("TrainingJob", changed["metadata"].get("namespace", ""), _label(changed, JOB))
        keys |= _keys(found for found in store.referring_to(job) if found["kind"] == "InferenceDeployment")
        keys |= _keys(_waiting_saves(store, changed))
    if changed["kind"] == "InferenceDeployment" or _role(changed) == "router":
        uid = _label(changed, DEPLOYMENT_UID) or changed["metadata"]["uid"]
        keys |= _keys(store.labelled(DEPLOYMENT_UID, uid, "EnginePool"))
    return keys


def only_heartbeat(old: Object, new: Object) -> bool:
    """Whether a node only sent another heartbeat."""
    return new["kind"] == "Node" and old.get("status") == new.get("status")


def only_progress(old: Object, new: Object) -> bool:
    """Whether only a job's progress and message changed. That is frequent, and concerns no other resource."""
    return new["kind"] == "TrainingJob" and _without_progress(old) == _without_progress(new)


def _without_progress(job: Object) -> Object:
    status = {name: value for name, value in (job.get("status") or {}).items() if name not in ("progress", "message")}
    metadata = {name: value for name, value in job["metadata"].items() if name != "resourceVersion"}
    return {**job, "metadata": metadata, "status": status}


def _around(store: Store, resource: Object, keys_config_map: str) -> Iterator[Object]:
    metadata = resource["metadata"]
    namespace = metadata.get("namespace", "")
    yield from store.owned_by(metadata["uid"])
    named = [*store.references_of(key_of(resource)), Key("ConfigMap", namespace, keys_config_map)]
    yield from (found for found in map(store.get, sorted(named)) if found is not None)
    yield from _EXTRA[resource["kind"]](store, resource)


def _around_job(store: Store, job: Object) -> Iterator[Object]:
    """Its pods, tasks and Checkpoints by label, adopted or not, and evicted pods as they ended."""
    yield from store.gone(JOB_UID, job["metadata"]["uid"])
    yield from store.labelled(JOB_UID, job["metadata"]["uid"])


def _around_checkpoint(store: Store, checkpoint: Object) -> Iterator[Object]:
    """Its job with the pods that can save now, and its users, which name it in spec or status.

    When it is being deleted, also the Checkpoints that may have the same data. While a task may have to verify it, also
    those of its job, whose newer saves come first.
    """
    metadata = checkpoint["metadata"]
    yield from store.labelled(CHECKPOINT_UID, metadata["uid"])
    yield from store.referring_to(key_of(checkpoint))
    if metadata.get("deletionTimestamp"):
        yield from store.of_kind("Checkpoint", metadata.get("namespace", ""))
    for job in _jobs_of(store, checkpoint):
        yield job
        yield from store.labelled(JOB_UID, job["metadata"]["uid"], "Pod")
        if _is_unverified(checkpoint):
            yield from store.labelled(JOB_UID, job["metadata"]["uid"], "Checkpoint")


def _around_deployment(store: Store, deployment: Object) -> Iterator[Object]:
    """Pools, engines and routers by label, and the Checkpoints that a selector chooses from."""
    yield from store.labelled(DEPLOYMENT_UID, deployment["metadata"]["uid"])
    for job in store.references_of(key_of(deployment)):
        if job.kind == "TrainingJob":
            saves = store.labelled(JOB, job.name, "Checkpoint")
            yield from (found for found in saves if key_of(found).namespace == job.namespace)


def _around_pool(store: Store, pool: Object) -> Iterator[Object]:
    """Its deployment and the deployment's routers, whose reports name the snapshot that they took."""
    uid = _label(pool, DEPLOYMENT_UID)
    deployment = store.by_uid(uid)
    if deployment is not None:
        yield deployment
    yield from (found for found in store.labelled(DEPLOYMENT_UID, uid, "Pod") if _role(found) == "router")


_EXTRA: dict[str, Callable[[Store, Object], Iterator[Object]]] = {
    "TrainingJob": _around_job,
    "Checkpoint": _around_checkpoint,
    "InferenceDeployment": _around_deployment,
    "EnginePool": _around_pool,
}


def _jobs_of(store: Store, checkpoint: Object) -> Iterator[Object]:
    job = store.by_uid(_label(checkpoint, JOB_UID))
    if job is not None:
        yield job
    for key in store.references_of(key_of(checkpoint)):
        found = store.get(key) if key.kind == "TrainingJob" else None
        if found is not None and found is not job:
            yield found


def _owners(changed: Object) -> Iterator[Key]:
    namespace = changed["metadata"].get("namespace", "")
    for owner in changed["metadata"].get("ownerReferences") or ():
        if owner["kind"] in OURS:
            yield Key(owner["kind"], namespace, owner["name"])


def _labelled(changed: Object) -> Iterator[Key]:
    namespace = changed["metadata"].get("namespace", "")
    for kind, label in (("TrainingJob", JOB), ("InferenceDeployment", DEPLOYMENT)):
        name = _label(changed, label)
        if name:
            yield Key(kind, namespace, name)


def _both_ways(store: Store, changed: Object) -> Iterator[Key]:
    yield from _keys(found for found in store.referring_to(key_of(changed)) if found["kind"] in OURS)
    key = key_of(changed)
    named = store.references_of(key) if store.get(key) is changed else references(changed)
    yield from (target for target in named if target.kind in OURS)
    checkpoint = store.by_uid(_label(changed, CHECKPOINT_UID))
    if checkpoint is not None:
        yield key_of(checkpoint)
    if _role(changed) == "trainer":
        job = Key("TrainingJob", changed["metadata"].get("namespace", ""), _label(changed, JOB))
        saves = [*store.labelled(JOB_UID, _label(changed, JOB_UID), "Checkpoint"), *store.referring_to(job)]
        yield from _keys(found for found in saves if _waits_for_word(found))
        yield from _keys(_resumed_without_loss(store, changed, store.get(job)))


def _waits_for_word(found: Object) -> bool:
    """Whether the trainer may report something new about a Checkpoint: its save is requested, or not read back yet."""
    phase = (found.get("status") or {}).get("phase", "Pending")
    return found["kind"] == "Checkpoint" and (phase in ("Pending", "Saving") or _is_unverified(found))


def _resumed_without_loss(store: Store, leader: Object, job: Object | None) -> Iterator[Object]:
    """The save that an attempt resumed and has validated, while its Checkpoint lacks the loss."""
    if leader["kind"] != "Pod" or job is None:  # Services and ConfigMaps of trainers have their role, too
        return
    if start_validation(leader, store.report(leader["metadata"]["uid"])) is None:
        return
    resumed = ((job.get("status") or {}).get("attempt") or {}).get("resumedFrom") or {}
    found = store.get(Key("Checkpoint", job["metadata"].get("namespace", ""), resumed.get("name") or ""))
    if found is not None and not (found.get("status") or {}).get("validationLoss"):
        yield found


def _waiting_saves(store: Store, changed: Object) -> Iterator[Object]:
    """Unverified saves of the job that may have waited for a newer one, which takes no place of its retention now.

    A save that the retention itself gave up changes nothing for them.
    """
    if takes_place(changed) or EXPIRED in (changed["metadata"].get("labels") or {}):
        return
    siblings = store.labelled(JOB_UID, _label(changed, JOB_UID), "Checkpoint") if _label(changed, JOB_UID) else ()
    yield from (found for found in siblings if _is_unverified(found))


def _is_unverified(checkpoint: Object) -> bool:
    status = checkpoint.get("status") or {}
    return status.get("phase") == "Complete" and not status.get("verifiedAt")


def _by_kind(around: Iterable[Object]) -> dict[str, tuple[Object, ...]]:
    kinds: defaultdict[str, list[Object]] = defaultdict(list)
    for found in sorted(around, key=key_of):
        kinds[found["kind"]].append(found)
    return {kind: tuple(found) for kind, found in kinds.items()}


def _reports(store: Store, around: Iterable[Object]) -> dict[str, Report]:
    uids = [found["metadata"]["uid"] for found in around if found["kind"] == "Pod"]
    reports = {uid: store.report(uid) for uid in uids}
    return {uid: report for uid, report in reports.items() if report is not None}


def _keys(resources: Iterable[Object]) -> set[Key]:
    return {key_of(resource) for resource in resources}


def _label(resource: Object, label: str) -> str:
    return str((resource["metadata"].get("labels") or {}).get(label, ""))


def _role(resource: Object) -> str:
    return _label(resource, ROLE)
