"""Gangs whose pods keep each other off a node get a node for each."""

from __future__ import annotations

from typing import Any

import pytest

from stoker.operator.domain.placement.apart import stand_apart
from stoker.operator.domain.placement.gang import Gang
from stoker.operator.domain.placement.node_capacity import NodeCapacity, pinned_node
from stoker.operator.domain.placement.place import place
from stoker.operator.domain.placement.place_rest import place_rest
from stoker.operator.domain.placement.unplaceable import Unplaceable
from stoker.operator.domain.settings import Settings
from testing.operator.ready_node import ready_node
from testing.operator.training_world import Run

OWN = {"stoker.dev/job": "run"}
HOST = "kubernetes.io/hostname"


def against(selector: Any, key: str = HOST, rule: str = "required", **more: Any) -> dict[str, Any]:
    term = {"topologyKey": key, "labelSelector": selector, **more}
    return {"affinity": {"podAntiAffinity": {f"{rule}DuringSchedulingIgnoredDuringExecution": [term]}}}


def with_port(**port: Any) -> list[dict[str, Any]]:
    return [{"name": "main", "ports": [{"containerPort": 8080, **port}]}]


MINE = {"matchLabels": OWN}


@pytest.mark.parametrize(
    ("spec", "apart"),
    [
        ({"containers": with_port()}, False),
        ({"containers": with_port(hostPort=8080)}, True),
        ({"containers": with_port(), "hostNetwork": True}, True),
        ({"containers": [], "initContainers": with_port(hostPort=1)}, False),
        ({"containers": [], "initContainers": [{**with_port(hostPort=1)[0], "restartPolicy": "Always"}]}, True),
        (against(MINE), True),
        (against({}), True),
        (against(None), False),
        (against({"matchLabels": {"app": "mine"}}), True),
        (against({"matchLabels": {"app": "other"}}), False),
        (against({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["mine"]}]}), False),
        (against({"matchExpressions": [{"key": "app", "operator": "Exists"}]}), True),
        (against(MINE, key="rack"), False),
        (against(MINE, rule="preferred"), False),
        (against(MINE, namespaces=["other"]), False),
        (against(MINE, namespaceSelector={}), True),
        (against(MINE, mismatchLabelKeys=["app"]), False),
    ],
)
def test_host_ports_and_affinity_against_ones_own_labels_keep_pods_apart(spec: dict[str, Any], apart: bool) -> None:
    assert stand_apart({"metadata": {"labels": {"app": "mine"}}, "spec": spec}, OWN) is apart


def node(name: str, gpus: int) -> NodeCapacity:
    return NodeCapacity(name=name, free={"nvidia.com/gpu": gpus, "pods": 100}, labels={HOST: name})


def test_no_two_pods_that_stand_apart_get_one_node() -> None:
    gang = Gang(requests={"nvidia.com/gpu": 1}, replicas=3, apart=True)
    nodes = [node(name, 8) for name in ("n0", "n1", "n2")]
    found = place(gang, nodes)
    assert not isinstance(found, Unplaceable)
    assert sorted(found.nodes) == ["n0", "n1", "n2"]
    rest = place_rest(gang, nodes, {0: "n1"})
    assert rest is not None
    assert (rest.nodes[0], sorted(rest.nodes)) == ("n1", ["n0", "n1", "n2"])
    assert place(gang, nodes[:2]) == Unplaceable("WaitingForCapacity", "2 of 3 pods fit on 2 nodes, no two on one node")


@pytest.mark.parametrize("spec", [{"hostNetwork": True}, against({"matchLabels": {"stoker.dev/job": "run"}})])
def test_a_job_in_the_hosts_network_is_spread_over_nodes(spec: dict[str, Any]) -> None:
    workers = {"replicas": 2, "gpusPerPod": 1, "podTemplate": {"spec": spec}}
    training = {"totalSteps": 100, "globalBatchSize": 8}
    run = Run(Settings(places_gangs=True), workers=workers, training=training)
    for name in ("n0", "n1"):
        run.cluster.add(ready_node(name, 8))
    run.cluster.settle()
    assert sorted(str(pinned_node(pod)) for pod in run.gang) == ["n0", "n1"]
