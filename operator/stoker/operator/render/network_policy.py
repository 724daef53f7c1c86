"""NetworkPolicies: who may reach the pods of a job, a pool and a deployment. The network plugin enforces them.

Rendezvous and collectives of a job have no authentication, so only pods of the job reach its ranks. Agents and engines
are open to operator, routers and metrics. Everyone in the cluster may call a router.

Pure; called by the reconcilers that make pods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stoker.operator.api.enginepool import EnginePool
from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.trainingjob import TrainingJob
from stoker.operator.domain.labels import DEPLOYMENT_UID, JOB_UID, ROLE
from stoker.operator.domain.plan import Object
from stoker.operator.domain.settings import NetworkPolicies, Settings
from stoker.operator.render.engine import pool_labels, selector_of
from stoker.operator.render.names import stem
from stoker.operator.render.pod import metadata_of
from stoker.operator.render.router import deployment_labels
from stoker.operator.render.trainer import job_labels

Peers = Sequence[Mapping[str, Any]]


def trainer_policies(job: TrainingJob, resource: Object, settings: Settings) -> tuple[Object, ...]:
    """Render the policy of a job's ranks: all ports from each other, the agent's from operator and metrics."""
    wanted = settings.network_policies
    if wanted is None:
        return ()
    selector = {JOB_UID: job.metadata.uid, ROLE: "trainer"}
    ingress = [{"from": [_pods(selector)]}, _on_port(settings.agent_port, _outside(wanted))]
    metadata = metadata_of(resource, stem(job.metadata.name, job.metadata.uid), "trainer", job_labels(job))
    return (_policy(metadata, selector, ingress),)


def engine_policies(pool: EnginePool, resource: Object, settings: Settings) -> tuple[Object, ...]:
    """Render the policy of a pool's engines: their port from routers, eval tasks, operator and metrics.

    Engines of prefill and decode pools also reach each other's ports for blocks, the pods of replicas of several all
    ports of each other.
    """
    wanted = settings.network_policies
    if wanted is None:
        return ()
    uid = pool.metadata.labels[DEPLOYMENT_UID]
    peers = [_pods({DEPLOYMENT_UID: uid, ROLE: role}) for role in ("router", "task")]
    metadata = metadata_of(resource, stem(pool.metadata.name, pool.metadata.uid), "engine", pool_labels(pool))
    ingress = [_on_port(settings.engine_port, [*peers, *_outside(wanted)])]
    if any(revision.template.role != "colocated" for revision in pool.spec.revisions):
        engines = _pods({DEPLOYMENT_UID: uid, ROLE: "engine"})
        ports = transfer_ports([revision.template.config for revision in pool.spec.revisions], settings.transfer_port)
        ingress += [_on_port(port, [engines]) for port in ports]
    if any(revision.template.pods_per_replica > 1 for revision in pool.spec.revisions):
        ingress.append({"from": [_pods(selector_of(pool))]})  # collectives take any port
    return (_policy(metadata, selector_of(pool), ingress),)


def transfer_ports(configs: Sequence[Mapping[str, Any]], first: int) -> range:
    """The ports of all copies of the model in a pod, of the revision with most: for each copy one for messages of other
    engines, and two for the blocks of each of its ranks."""
    return range(first, first + max(map(_num_transfer_ports, configs)))


def _num_transfer_ports(config: Mapping[str, Any]) -> int:
    shape, pods = config.get("parallelism", {}), config.get("replica", {}).get("pods", 1)
    ranks = shape.get("tensor", 1) * shape.get("pipeline", 1)
    return int(max(shape.get("data", 1) // pods, 1) * (1 + 2 * ranks))


def router_policies(deployment: InferenceDeployment, resource: Object, settings: Settings) -> tuple[Object, ...]:
    """Render the policy of a deployment's routers: their port from everywhere."""
    if settings.network_policies is None:
        return ()
    name = f"{stem(deployment.metadata.name, deployment.metadata.uid)}-router"
    metadata = metadata_of(resource, name, "router", deployment_labels(deployment))
    selector = {DEPLOYMENT_UID: deployment.metadata.uid, ROLE: "router"}
    return (_policy(metadata, selector, [_on_port(settings.router_port, ())]),)


def _policy(metadata: Mapping[str, Any], selector: Mapping[str, str], ingress: Sequence[Mapping[str, Any]]) -> Object:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": dict(metadata),
        "spec": {
            "podSelector": {"matchLabels": dict(selector)},
            "policyTypes": ["Ingress"],
            "ingress": [dict(rule) for rule in ingress],
        },
    }


def _on_port(port: int, peers: Peers) -> dict[str, Any]:
    """Return one rule; without peers it allows everyone."""
    rule: dict[str, Any] = {"ports": [{"protocol": "TCP", "port": port}]}
    return {**rule, "from": [dict(peer) for peer in peers]} if peers else rule


def _pods(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the peer for pods of the same namespace."""
    return {"podSelector": {"matchLabels": dict(labels)}}


def _outside(wanted: NetworkPolicies) -> Peers:
    """Return the peers outside of the resource: the operator's pods, and those that scrape metrics."""
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": wanted.operator_namespace}},
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/part-of": "stoker", "app.kubernetes.io/component": "operator"}
        },
    }
    return (operator, *wanted.metrics_from)
