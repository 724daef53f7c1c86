"""A cluster without time and threads: a dictionary of objects and plans applied action by action.

It is the slow twin of executor, informers and kubelet for property tests. A plan may stop after any action (a crash),
and a test drives the pods through every behaviour that pods can have.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from stoker.operator.domain.applied_hash import is_applied, with_applied_hash
from stoker.operator.domain.autoscaling.record import PoolScaling
from stoker.operator.domain.clock import timestamp
from stoker.operator.domain.labels import REPLICA, ROLE
from stoker.operator.domain.lost_nodes import NodeLoss
from stoker.operator.domain.placement.node_capacity import NodeCapacity, empty_node, pinned_node, pod_use, remaining
from stoker.operator.domain.plan import Key, Object, Observed, Plan, Ref
from stoker.operator.domain.pods import is_gated, is_owned, label
from stoker.operator.domain.queue.decide import decide
from stoker.operator.domain.queue.reading import makes_gang, read_queue
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.observe import observe
from stoker.operator.loop.store import Store, key_of
from stoker.pod.causes import EXIT_CODES, Cause
from stoker.pod.termination_message import SaveReport, TerminationMessage
from testing.operator.followed_store import FollowedStore
from testing.operator.json_copy import json_copy

Reconciler = Callable[[Observed, Settings, datetime], Plan]
START = datetime(2026, 1, 1, tzinfo=UTC)


class Crash(Exception):
    """Raised where the operator dies in the middle of a plan, or a write of it is refused."""


class Refused(Exception):
    """Raised where the cluster refuses a pod. The rest of the plan goes on, and the next pass sees the refusal."""


class SimulatedCluster:
    """The objects, pods and calls that a reconcile can see or change."""

    def __init__(self, reconcilers: Mapping[str, Reconciler], settings: Settings | None = None) -> None:
        self.reconcilers = reconcilers
        self.settings = settings or Settings()
        self.objects: dict[Key, Object] = {}
        self.reports: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str, dict[str, Any]]] = []
        self.events: list[str] = []
        self.gone: list[Object] = []
        """Pods that were evicted: they ended by themselves, and were removed before any pass."""
        self.ending: set[str] = set()
        """Namespaces that are known to refuse new objects."""
        self.closed: set[str] = set()
        """Those that refuse new objects; the operator learns it from the first that it makes."""
        self.pod_quota: int | None = None
        """Pods that may be there, ended ones not counted; more are refused."""
        self.refusals: dict[Key, str] = {}
        """What was refused to the last pass over a resource."""
        self.scaling: dict[str, PoolScaling] = {}
        """The autoscaler's decisions about the pools of every deployment."""
        self.losses: NodeLoss | None = None
        """Lost and silent nodes, as the watch over nodes classifies them."""
        self.now = START
        self.version = 0
        self.uids = 0
        self.writes = 0
        self._followed = FollowedStore()

    # Objects

    def add(self, body: Object) -> Object:
        """Create an object as the API server would."""
        key = _key(body)
        if key in self.objects:
            return self.objects[key]
        made: Object = json_copy(body)
        self.uids += 1
        metadata = made["metadata"]
        metadata.setdefault("namespace", "default")
        metadata |= {"uid": f"uid-{self.uids:04d}", "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
        if made["kind"] == "Pod":
            made["status"] = {"phase": "Pending"}
        self.objects[key_of(made)] = made
        self._touch(made)
        return made

    def change_spec(self, key: Key, change: Callable[[dict[str, Any]], None]) -> None:
        found = self.objects[key]
        change(found["spec"])
        found["metadata"]["generation"] += 1
        self._touch(found)

    def delete(self, key: Key) -> None:
        """Delete an object as the API server does: one with finalizers or a running pod first gets a timestamp."""
        found = self.objects.get(key)
        if found is None:
            return
        running = found["kind"] == "Pod" and found["status"]["phase"] in {"Pending", "Running"}
        if found["metadata"].get("finalizers") or running:
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            self._touch(found)
        else:
            self._remove(key)

    def evict(self, pod: Object) -> None:
        """Evict a pod: its object goes at once, and only the informers saw its termination message."""
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.gone.append(json_copy(pod))
        self._remove(key_of(pod))

    def of_kind(self, kind: str) -> list[Object]:
        return [found for key, found in sorted(self.objects.items()) if key.kind == kind]

    # The operator

    def plan(self, key: Key) -> Plan:
        seen = observe(self._store(), key, 1.0, losses=self.losses)
        if seen is None:
            return Plan()
        seen = replace(seen, refusal=self.refusals.get(key))
        if self.settings.places_gangs:
            seen = self._with_room(key, seen)
        if key.kind == "InferenceDeployment":
            seen = replace(seen, scaling=dict(self.scaling))
        before = json.dumps(seen.resource, sort_keys=True)
        plan = self.reconcilers[key.kind](seen, self.settings, self.now)
        assert json.dumps(seen.resource, sort_keys=True) == before, "a reconcile must not change what it sees"
        return plan

    def _store(self) -> Store:
        if not self._followed.can_follow(self.objects, self.reports):
            self._followed = FollowedStore()
        self._followed.follow(self.objects, self.reports, self.gone, self.ending)
        return self._followed.store

    def _with_room(self, key: Key, seen: Observed) -> Observed:
        """What the loop adds for a gang that waits, decided from scratch."""
        if key.kind == "EnginePool":
            return replace(seen, nodes=self._pool_room(seen))
        nodes = self._room(key)
        uid = seen.resource["metadata"]["uid"]
        own = [pod for pod in seen.of_kind("Pod") if label(pod, ROLE) == "trainer" and is_owned(pod, uid)]
        if key.kind != "TrainingJob" or any(map(pod_use, own)):
            return replace(seen, nodes=nodes if key.kind == "TrainingJob" else None)
        free = remaining(map(empty_node, self.of_kind("Node")), filter(None, map(pod_use, self.of_kind("Pod"))))
        jobs, pods = self.of_kind("TrainingJob"), self.of_kind("Pod")
        applicants, holdings = read_queue(jobs, pods, pod_use, self.now)
        if makes_gang(seen.resource) and not any(map(is_gated, own)):
            others = {found.name for found in applicants} - {f"{key.namespace}/{key.name}"}
            return seen if others else replace(seen, nodes=nodes)
        turns = decide(applicants, free, holdings)
        turn = turns.get(f"{key.namespace}/{key.name}")
        if turn is not None and turn.nodes is not None:
            nodes = tuple(node for node in nodes if node.name in turn.nodes)
        return replace(seen, nodes=nodes, turn=turn)

    def _pool_room(self, seen: Observed) -> tuple[NodeCapacity, ...]:
        """What the nodes have left beside the pods of the pool's replicas that wait."""
        own = seen.of_kind("Pod")
        waiting = {label(pod, REPLICA) or pod["metadata"]["name"] for pod in own if is_gated(pod)}
        left = {pod["metadata"]["uid"] for pod in own if (label(pod, REPLICA) or pod["metadata"]["name"]) in waiting}
        others = (pod for pod in self.of_kind("Pod") if pod["metadata"]["uid"] not in left)
        return remaining(map(empty_node, self.of_kind("Node")), filter(None, map(pod_use, others)))

    def _room(self, key: Key) -> tuple[NodeCapacity, ...]:
        """What the nodes have left beside the pods of other resources."""
        uid = self.objects[key]["metadata"]["uid"]
        others = (pod for pod in self.of_kind("Pod") if not is_owned(pod, uid))
        return remaining(map(empty_node, self.of_kind("Node")), (use for pod in others if (use := pod_use(pod))))

    def reconcile(self, key: Key, crash_after: int | None = None) -> Plan:
        """Run one pass. With `crash_after`, the operator dies after that many writes.

        Raises:
            Crash: it died.
        """
        plan = self.plan(key)
        left = [crash_after]
        self.refusals.pop(key, None)
        for action in self._actions(key, plan):
            if left[0] is not None:
                if left[0] == 0:
                    raise Crash
                left[0] -= 1
            self.writes += 1
            try:
                action()
            except Refused as refusal:
                self.refusals[key] = str(refusal)
        return plan

    def settle(self, rounds: int = 60) -> None:
        """Reconcile everything until no work is left."""
        for _ in range(rounds):
            plans = [self.reconcile(key) for key in sorted(self.objects) if key.kind in self.reconcilers]
            if all(plan.empty for plan in plans):
                return
        raise AssertionError(f"no rest after {rounds} rounds: {[plan for plan in plans if not plan.empty]}")

    def settle_once(self) -> None:
        """Run one pass over everything."""
        for key in sorted(self.objects):
            if key.kind in self.reconcilers and key in self.objects:
                self.reconcile(key)

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def _actions(self, key: Key, plan: Plan) -> list[Callable[[], None]]:
        actions: list[Callable[[], None]] = []
        held = self.objects[key]["metadata"].get("finalizers", []) if key in self.objects else []
        if plan.finalizers is not None:
            added = [name for name in plan.finalizers if name not in held]
            if added:
                actions.append(lambda: self._finalizers(key, [*held, *added]))
        if plan.status is not None:
            actions.append(lambda: self._status(key, plan.status or {}))
        actions += [partial(self._create, {**body, "data": {"key": "drawn"}}) for body in plan.generate]
        actions += [partial(self._create, body) for body in plan.create]
        actions += [
            partial(self._apply, body) for body in plan.apply if not is_applied(body, self.objects.get(_key(body)))
        ]
        actions += [partial(self._patch, patch.ref, patch.body) for patch in plan.patch]
        actions += [partial(self._scale, scale.ref, scale.replicas) for scale in plan.scale]
        actions += [partial(self._delete_ref, ref) for ref in plan.delete]
        actions += [partial(self._remove, Key(ref.kind, ref.namespace, ref.name)) for ref in plan.force_delete]
        actions += [partial(self.calls.append, (call.pod.name, call.path, dict(call.body))) for call in plan.calls]
        actions += [partial(self.events.append, event.reason) for event in plan.events]
        if plan.finalizers is not None and set(held) - set(plan.finalizers):
            actions.append(lambda: self._finalizers(key, list(plan.finalizers or ())))
        return actions

    def _create(self, body: Object) -> None:
        namespace = body["metadata"].get("namespace", "default")
        if namespace in self.closed:
            self.ending.add(namespace)
            raise Crash
        if body["kind"] == "Pod" and self.pod_quota is not None and self._count_pods() >= self.pod_quota:
            raise Refused("exceeded quota: pods")
        self.add(body)

    def _count_pods(self) -> int:
        return sum(pod["status"]["phase"] in {"Pending", "Running"} for pod in self.of_kind("Pod"))

    def _apply(self, body: Object) -> None:
        key = _key(body)
        labelled = with_applied_hash(body)
        if key not in self.objects:
            if key.namespace in self.closed:
                raise Crash
            self.add(labelled)
            return
        found = self.objects[key]
        for part, value in labelled.items():
            if part == "metadata":
                found["metadata"]["labels"] = {**found["metadata"].get("labels", {}), **value.get("labels", {})}
            elif part != "status" and not (part == "spec" and body["kind"] == "EnginePool"):
                found[part] = json_copy(value)
            elif part == "spec":
                found["spec"] = {**json_copy(value), "replicas": found["spec"].get("replicas", 1)}
        found["metadata"]["generation"] += 1
        self._touch(found)

    def _status(self, key: Key, status: dict[str, Any]) -> None:
        if key in self.objects:
            self.objects[key]["status"] = json_copy(status)
            self._touch(self.objects[key])

    def _finalizers(self, key: Key, names: list[str]) -> None:
        found = self.objects.get(key)
        if found is None:
            return
        found["metadata"]["finalizers"] = names
        self._touch(found)
        if not names and found["metadata"].get("deletionTimestamp"):
            self._remove(key)

    def _patch(self, ref: Ref, body: Mapping[str, Any]) -> None:
        found = self._exact(ref)
        if found is not None:
            _merge(found, body)
            self._touch(found)

    def _scale(self, ref: Ref, replicas: int) -> None:
        found = self._exact(ref)
        if found is not None:
            found["spec"]["replicas"] = replicas
            found["metadata"]["generation"] += 1
            self._touch(found)

    def _delete_ref(self, ref: Ref) -> None:
        if self._exact(ref) is not None:
            self.delete(Key(ref.kind, ref.namespace, ref.name))

    def _exact(self, ref: Ref) -> Object | None:
        found = self.objects.get(Key(ref.kind, ref.namespace, ref.name))
        return found if found is not None and found["metadata"]["uid"] == ref.uid else None

    def _remove(self, key: Key) -> None:
        gone = self.objects.pop(key, None)
        if gone is None:
            return
        for other_key, other in list(self.objects.items()):
            owners = {owner["uid"] for owner in other["metadata"].get("ownerReferences", ())}
            if gone["metadata"]["uid"] in owners:
                self.delete(other_key)

    def _touch(self, found: Object) -> None:
        self.version += 1
        found["metadata"]["resourceVersion"] = str(self.version)

    # The kubelet and the programs

    def pods(self, role: str) -> list[Object]:
        return [pod for pod in self.of_kind("Pod") if pod["metadata"]["labels"].get("stoker.dev/role") == role]

    def run(self, pod: Object, *, ready: bool = True) -> None:
        """Run the pod's container."""
        if pod["status"]["phase"] != "Pending":
            return
        assert not pod["spec"].get("schedulingGates"), "a gated pod does not run"
        pod["spec"]["nodeName"] = pinned_node(pod) or "node-1"
        pod["status"] = {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        }
        self._touch(pod)

    def end(self, pod: Object, cause: Cause, **word: Any) -> None:
        """End the pod's container with a termination message."""
        saves = tuple(SaveReport(**save) for save in word.pop("saves", ()))
        text = TerminationMessage(cause=cause, saves=saves, **word).encode().decode()
        self._terminate(pod, EXIT_CODES[cause], text)

    def kill(self, pod: Object) -> None:
        """Kill the pod's container without a termination message."""
        self._terminate(pod, 137, "")

    def vanish(self, pod: Object) -> None:
        """Remove the pod object, as a forced delete or a lost node does."""
        self.reports.pop(pod["metadata"]["uid"], None)
        self._remove(key_of(pod))

    def vanish_node(self, name: str) -> None:
        """Remove a node that has no pods, as a cluster does that grows smaller."""
        uses = filter(None, map(pod_use, self.of_kind("Pod")))
        if all(use.node != name for use in uses):
            for key in [key for key in self.objects if key.kind == "Node" and key.name == name]:
                self._remove(key)

    def collect(self) -> None:
        """End the pods that are being deleted."""
        for pod in self.of_kind("Pod"):
            if pod["metadata"].get("deletionTimestamp"):
                self.vanish(pod)

    def report(self, pod: Object, body: dict[str, Any]) -> None:
        self.reports[pod["metadata"]["uid"]] = body

    def _terminate(self, pod: Object, code: int, message: str) -> None:
        terminated = {"exitCode": code, "message": message, "finishedAt": timestamp(self.now)}
        pod["status"] = {
            "phase": "Succeeded" if code == 0 else "Failed",
            "containerStatuses": [{"name": "main", "state": {"terminated": terminated}}],
        }
        if pod["metadata"].get("deletionTimestamp"):
            self.vanish(pod)
        else:
            self._touch(pod)


def _key(body: Object) -> Key:
    return Key(body["kind"], body["metadata"].get("namespace", "default"), body["metadata"]["name"])


def _merge(target: dict[str, Any], patch: Mapping[str, Any]) -> None:
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, Mapping):
            _merge(target.setdefault(name, {}), value)
        else:
            target[name] = value
