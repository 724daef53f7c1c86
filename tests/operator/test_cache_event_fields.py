"""`engine.cacheEvents` of a manifest: its admission, and the engine's configuration with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.admission.admission import Admission
from stoker.operator.admission.status_cause import InvalidObject
from stoker.operator.api.inferencedeployment import InferenceDeployment
from stoker.operator.api.metadata import read
from stoker.operator.cluster.local.addresses import Addresses, Host
from stoker.operator.cluster.local.rewrite import Rewriter
from stoker.operator.domain.settings import Settings
from stoker.operator.render.engine import ModelSource, engine_template
from testing.operator.bad_manifests import DEPLOYMENT, changed

ROOT = Path(__file__).parents[2]
OWN = Settings()
ROLES = [{"name": "pre", "role": "prefill"}, {"name": "dec", "role": "decode"}]
WIDE = [{**pool, "ranksPerPod": 2, "parallelism": {"tensor": 2}} for pool in ROLES]
ROLE_COPIES = [{**pool, "ranksPerPod": 2, "parallelism": {"data": 2}} for pool in ROLES]
COPIES = [{"name": "main", "ranksPerPod": 4, "parallelism": {"data": 4}}]
PODS = [{"name": "main", "podsPerReplica": 2, "parallelism": {"tensor": 2}}]
PLAIN = [{"name": "main"}]


@pytest.fixture(scope="module")
def admission() -> Admission:
    return Admission.from_folder(ROOT / "crds")


def admitted(
    admission: Admission, events: dict[str, Any] | None, pools: list[dict[str, Any]] = PLAIN
) -> InferenceDeployment:
    engine: dict[str, Any] = {} if events is None else {"cacheEvents": events}
    manifest = changed(DEPLOYMENT, {"metadata.uid": "3b1f", "spec.engine": engine, "spec.pools": pools})
    return read(InferenceDeployment, admission.admit(manifest))


def rendered(deployment: InferenceDeployment) -> dict[str, Any]:
    template = engine_template(deployment, deployment.spec.pools[0], ModelSource("/model"), OWN)
    config: dict[str, Any] = template["config"]
    return config


def test_events_are_published_at_the_pods_address(admission: Admission) -> None:
    defaults = {"topic": "", "buffer_steps": 10000, "hwm": 100000}
    assert rendered(admitted(admission, {"port": 5557}))["cache_events"] == {
        "endpoint": "tcp://0.0.0.0:5557",
        **defaults,
    }
    events = {"port": 5557, "replayPort": 5657, "topic": "kv", "bufferSteps": 7, "hwm": 0}
    assert rendered(admitted(admission, events))["cache_events"] == {
        "endpoint": "tcp://0.0.0.0:5557",
        "replay_endpoint": "tcp://0.0.0.0:5657",
        "topic": "kv",
        "buffer_steps": 7,
        "hwm": 0,
    }


def test_an_engine_without_events_has_the_configuration_that_it_always_had(admission: Admission) -> None:
    deployment = admitted(admission, None)
    assert "cache_events" not in rendered(deployment)
    assert "cacheEvents" not in deployment.spec.engine.to_wire()


@pytest.mark.parametrize(
    ("events", "pools"),
    [
        ({"port": OWN.engine_port + 1}, PLAIN),
        ({"port": OWN.engine_port - 4}, COPIES),
        ({"port": OWN.transfer_port, "replayPort": OWN.rendezvous_port}, PLAIN),
        ({"port": OWN.transfer_port - 1, "replayPort": OWN.transfer_port + 5}, WIDE),
        ({"port": OWN.transfer_port - 2, "replayPort": OWN.transfer_port + 6}, ROLE_COPIES),
        ({"port": 5557, "replayPort": 5561}, COPIES),
        ({"port": 65532}, COPIES),
        ({"port": OWN.rendezvous_port + 1}, PODS),
    ],
)
def test_ports_beside_the_engines_own_are_taken(
    admission: Admission, events: dict[str, Any], pools: list[dict[str, Any]]
) -> None:
    assert admitted(admission, events, pools).spec.engine.cache_events is not None


@pytest.mark.parametrize(
    ("events", "pools", "text"),
    [
        ({"port": OWN.engine_port}, PLAIN, "none of the engine's:"),
        ({"port": 5557, "replayPort": OWN.engine_port}, PLAIN, "none of the engine's:"),
        ({"port": OWN.engine_port - 3}, COPIES, "none of the engine's:"),
        ({"port": OWN.transfer_port}, ROLES, "none of the engine's:"),
        ({"port": OWN.transfer_port + 2}, ROLES, "none of the engine's:"),
        ({"port": OWN.transfer_port + 4}, WIDE, "none of the engine's:"),
        ({"port": OWN.transfer_port - 1}, ROLE_COPIES, "none of the engine's:"),
        ({"port": OWN.transfer_port + 5}, ROLE_COPIES, "none of the engine's:"),
        ({"port": OWN.rendezvous_port}, PODS, "none of the engine's:"),
        ({"port": 65533}, COPIES, "at most 65535"),
        ({"port": 5557, "replayPort": 5557}, PLAIN, "must be apart"),
        ({"port": 5557, "replayPort": 5560}, COPIES, "must be apart"),
        ({"port": 5560, "replayPort": 5557}, COPIES, "must be apart"),
    ],
)
def test_a_port_that_the_engine_needs_is_refused(
    admission: Admission, events: dict[str, Any], pools: list[dict[str, Any]], text: str
) -> None:
    with pytest.raises(InvalidObject, match=text):
        admitted(admission, events, pools)


@pytest.mark.parametrize("mode", ["loopback", "ports"])
def test_a_pod_of_the_embedded_cluster_publishes_at_its_own_address(mode: Any) -> None:
    addresses, own = Addresses(mode, lambda _: True), Host("pod", "team", "chat-0")
    config = {"cache_events": {"endpoint": "tcp://0.0.0.0:5557", "topic": "tcp://0.0.0.0:kv"}}
    found = json.loads(Rewriter("team", own, {}, addresses).file("config.json", json.dumps(config)))["cache_events"]
    assert found["endpoint"] == f"tcp://{addresses.ip(own)}:{addresses.port(own, 5557)}"
    assert found["topic"] == "tcp://0.0.0.0:kv"
