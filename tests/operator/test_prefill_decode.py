"""Prefill and decode pools: their key, their engines' configuration, their revisions, and what the conditions tell."""

from __future__ import annotations

import contextlib
import copy
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.engine.config import EngineConfig
from stoker.engine.plan_checks import refuse_transfer
from stoker.engine.ranks.pod_share import share_of_pod
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.settings import NetworkPolicies, Settings
from stoker.operator.render.network_policy import transfer_ports
from stoker.pod.config_file import parse
from testing.operator.serving_world import CHAT, Serving, condition_of, label_of
from testing.operator.simulated_cluster import Crash

POOLS = [{"name": "pre", "role": "prefill"}, {"name": "dec", "role": "decode"}]
PRE, DEC = (Key("EnginePool", "default", f"chat-{name}") for name in ("pre", "dec"))


def serving(**spec: Any) -> Serving:
    made = Serving(**{"pools": copy.deepcopy(POOLS), **spec})
    made.checkpoint(10)
    return made


def secrets(world: Serving) -> list[Object]:
    return world.cluster.of_kind("Secret")


def engines_of(world: Serving, pool: str) -> list[Object]:
    return [pod for pod in world.engines() if label_of(pod, "pool") == pool]


def report(world: Serving, pod: Object, **transfer: Any) -> None:
    world.cluster.report(pod, {"phase": "Serving", "transfer": {"fingerprint": "fp", "unmet": "", **transfer}})


def told(world: Serving) -> tuple[str, str]:
    found = condition_of(world.status, "Disaggregated")
    return found.get("status", "absent"), found.get("reason", "")


def test_engines_of_both_roles_share_a_key_and_reach_each_other() -> None:
    world = serving(engine={"transfer": {"zoneBlocks": 64}})
    world.cluster.settings = Settings(network_policies=NetworkPolicies(operator_namespace="stoker-system"))
    world.rest(10)
    assert (world.status["phase"], world.status["ready"]) == ("Serving", "2/2")
    (secret,) = secrets(world)
    assert secret["metadata"]["ownerReferences"][0]["uid"] == world.cluster.objects[CHAT]["metadata"]["uid"]
    for pool, role in (("pre", "prefill"), ("dec", "decode")):
        (pod,) = engines_of(world, pool)
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert volumes["stoker-transfer"]["secret"]["secretName"] == secret["metadata"]["name"]
        name = volumes["stoker-config"]["configMap"]["name"]
        stored = world.cluster.objects[Key("ConfigMap", "default", name)]
        config = parse(EngineConfig, json.loads(stored["data"]["config.json"]), "config")
        assert config.role == role
        transfer = config.transfer
        assert (transfer.listen, transfer.zone_blocks) == ("0.0.0.0:8101", 64)
        mount = next(each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == "stoker-transfer")
        assert transfer.key_file == f"{mount['mountPath']}/key"
    policies = [found for found in world.cluster.of_kind("NetworkPolicy") if label_of(found, "role") == "engine"]
    for policy in policies:
        opened = [(rule["ports"][0]["port"], rule["from"][0]["podSelector"]["matchLabels"]) for rule in
                  policy["spec"]["ingress"]]  # fmt: skip
        uid = world.cluster.objects[CHAT]["metadata"]["uid"]
        others = {"stoker.dev/deployment-uid": uid, "stoker.dev/role": "engine"}
        assert opened[1:] == [(8101, others), (8102, others), (8103, others)]
    assert {entry["role"] for entry in world.snapshot()["backends"]} == {"prefill", "decode"}
    world.cluster.delete(CHAT)
    world.rest(3)
    assert secrets(world) == []


def test_a_pool_of_several_ranks_has_their_layout_and_their_ports() -> None:
    world = serving(pools=[{**POOLS[0], "ranksPerPod": 2, "parallelism": {"tensor": 2}}, POOLS[1]])
    world.cluster.settings = Settings(network_policies=NetworkPolicies(operator_namespace="stoker-system"))
    world.rest(10)
    assert (world.status["phase"], world.status["ready"]) == ("Serving", "2/2")
    for pool, ranks, ports in (("pre", 2, [8101, 8102, 8103, 8104, 8105]), ("dec", 1, [8101, 8102, 8103])):
        (pod,) = engines_of(world, pool)
        config = config_of(world, pod)
        assert (config.parallelism.tensor, config.replica.pods) == (ranks, 1)
        refuse_transfer(config, "cpu")
        policies = world.cluster.of_kind("NetworkPolicy")
        (policy,) = (found for found in policies if found["metadata"]["labels"].get("stoker.dev/pool") == pool)
        assert [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"]][1:] == ports


def test_every_pod_of_a_replica_has_the_key_and_its_leader_is_the_engine() -> None:
    world = serving(pools=[{**POOLS[0], "podsPerReplica": 2, "parallelism": {"pipeline": 2}}, POOLS[1]])
    world.rest(10)
    assert (world.status["phase"], world.status["ready"]) == ("Serving", "2/2")
    leader, member = engines_of(world, "pre")
    for pod in (leader, member):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {"stoker-transfer", "stoker-replica"} <= volumes.keys()
        stored = world.cluster.objects[Key("ConfigMap", "default", volumes["stoker-config"]["configMap"]["name"])]
        config = parse(EngineConfig, json.loads(stored["data"]["config.json"]), "config")
        assert (config.parallelism.pipeline, config.replica.pods, config.transfer.listen) == (2, 2, "0.0.0.0:8101")
        refuse_transfer(config, "cpu")
    backends = {entry["pod_uid"]: entry["role"] for entry in world.snapshot()["backends"]}
    assert backends[leader["metadata"]["uid"]] == "prefill"
    assert member["metadata"]["uid"] not in backends


def test_a_colocated_pool_has_no_key_and_the_configuration_that_it_always_had() -> None:
    world = Serving()
    world.checkpoint(10)
    world.rest(10)
    assert secrets(world) == []
    assert told(world) == ("absent", "")
    (stored,) = (found for found in world.cluster.of_kind("ConfigMap") if "chat-main-r" in found["metadata"]["name"])
    assert json.loads(stored["data"]["config.json"]).keys().isdisjoint({"role", "transfer"})


def test_an_operator_that_cannot_see_secrets_asks_for_the_key_before_the_first_engine_and_then_no_more() -> None:
    world = serving()
    world.cluster.settings = Settings(sees_secrets=False)
    for crash_after in range(12):
        with contextlib.suppress(Crash):
            world.cluster.reconcile(CHAT, crash_after=crash_after)
        assert secrets(world) or PRE not in world.cluster.objects
    assert PRE in world.cluster.objects
    world.rest(10)
    assert len(secrets(world)) == 1
    assert world.cluster.plan(CHAT).empty


def test_a_lost_key_is_made_again_where_the_operator_sees_it() -> None:
    world = serving()
    world.rest(10)
    (secret,) = secrets(world)
    world.cluster.delete(Key("Secret", "default", secret["metadata"]["name"]))
    world.rest(2)
    assert len(secrets(world)) == 1


def test_the_conditions_tell_whether_requests_are_split_and_why_not() -> None:
    world = serving()
    world.rest(10)
    (p,), (d,) = engines_of(world, "pre"), engines_of(world, "dec")
    report(world, p)
    report(world, d)
    world.cluster.settle_once()
    assert told(world) == ("True", "Paired")
    assert condition_of(world.status, "PoolsIncompatible") == {}

    report(world, d, fingerprint="another")
    world.cluster.settle_once()
    assert told(world) == ("False", "PoolsIncompatible")
    message = condition_of(world.status, "PoolsIncompatible")["message"]
    assert "transfer.fingerprint is fp and another" in message
    assert condition_of(world.status, "Ready")["status"] == "True"  # served as if colocated

    report(world, p, facts={"model": "m", "kv_dtype": "bfloat16"})
    report(world, d, fingerprint="another", facts={"model": "m", "kv_dtype": "float8_e4m3fn"})
    world.cluster.settle_once()
    message = condition_of(world.status, "PoolsIncompatible")["message"]
    assert "kv_dtype is bfloat16 and float8_e4m3" in message

    report(world, d, unmet="require nvlink: only tcp and shared-memory are there")
    world.cluster.settle_once()
    assert told(world) == ("False", "TransportUnmet")
    assert "require nvlink" in condition_of(world.status, "Disaggregated")["message"]
    assert condition_of(world.status, "PoolsIncompatible") == {}

    report(world, d, avoided={"10.0.0.7:8101": "damaged: 3 damaged blocks within 60 s"})
    world.cluster.settle_once()
    assert told(world) == ("True", "PeerAvoided")  # by other pairs
    message = condition_of(world.status, "Disaggregated")["message"]
    assert "instead of asking 10.0.0.7:8101: damaged: 3 damaged blocks within 60 s" in message


def test_a_store_or_disk_tier_that_fails_is_told_and_changes_nothing_else() -> None:
    world = serving()
    world.rest(10)
    (p,), (d,) = engines_of(world, "pre"), engines_of(world, "dec")
    told_store = lambda: condition_of(world.status, "StoreUnavailable")  # noqa: E731

    def say(pod: Object, **tiers: Any) -> None:
        found = {tier: {"state": state, "blocks": 3} for tier, state in tiers.items()}
        world.cluster.report(pod, {"phase": "Serving", **found})
        world.cluster.settle_once()

    say(p, store="ok", disk_tier="opening")
    say(d, store="volume-1: opening")
    assert told_store() == {}
    say(d, store="volume-0: opening; volume-1: OSError: [Errno 116] Stale file handle")
    assert (told_store()["status"], told_store()["reason"]) == ("True", "StoreFailed")
    name = d["metadata"]["name"]
    text = f"{name} computes what it would load: store.state is volume-1: OSError: [Errno 116] Stale file handle"
    assert told_store()["message"] == text
    assert condition_of(world.status, "Ready")["status"] == "True"
    say(d, store="ok")
    assert told_store() == {}
    say(p, disk_tier="hangs for more than 5 s")
    assert told_store()["reason"] == "DiskTierFailed"


@pytest.mark.parametrize(
    ("gone", "reason", "instead"),
    [
        ("pre", "NoPrefillEngine", "decode engines compute prompts themselves"),
        ("dec", "NoDecodeEngine", "prefill engines answer requests themselves"),
    ],
)
def test_a_lost_pool_means_service_as_if_colocated(gone: str, reason: str, instead: str) -> None:
    world = serving()
    world.rest(10)
    (pod,) = engines_of(world, gone)
    world.cluster.kill(pod)
    world.cluster.settle_once()
    assert told(world) == ("False", reason)
    assert instead in condition_of(world.status, "Disaggregated")["message"]
    assert len([entry for entry in world.snapshot()["backends"] if not entry["draining"]]) == 1
    world.cluster.advance(120)
    world.rest(10)
    assert told(world) == ("True", "Paired")
    assert world.status["phase"] == "Serving"


def test_one_pool_of_no_replicas_is_service_as_asked_and_both_are_scaled_to_zero() -> None:
    world = serving()
    world.rest(10)
    world.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=0))
    world.rest(10)
    assert (world.status["phase"], told(world)) == ("Serving", ("False", "NoPrefillEngine"))
    world.cluster.change_spec(CHAT, lambda spec: spec["pools"][1].update(replicas=0))
    world.rest(10)
    assert (world.status["phase"], told(world)) == ("ScaledToZero", ("False", "NoEngine"))
    assert world.status["message"] == "scaled to zero: no replicas in pools pre, dec"


def test_both_pools_move_to_a_new_revision_and_a_ready_engine_of_each_role_stays() -> None:
    world = serving()
    world.rest(10)
    old = world.status["currentRevision"]
    world.checkpoint(20)
    for _ in range(16):
        world.cluster.settle_once()
        usable = {entry["role"] for entry in world.snapshot()["backends"] if not entry["draining"]}
        assert usable == {"prefill", "decode"}
        current = world.status["currentRevision"]
        if current != old:  # nothing counts as moved before both pools have
            assert {label_of(pod, "revision") for pod in world.engines()} == {current}
        world.live()
        world.cluster.advance(2)
    world.rest(5)
    assert world.status["currentCheckpoint"]["step"] == 20
    assert world.engines(old) == []
    assert len(secrets(world)) == 1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["deployment", "pre", "dec", "run", "snapshots", "drain", "collect", "kill", "vanish",
                         "checkpoint", "scale", "secret", "wait"]),
        st.integers(0, 6),
    ),
    max_size=25,
)  # fmt: skip


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS)
def test_any_order_of_events_ends_with_both_pools_serving(events: list[tuple[str, int]]) -> None:
    world = serving()
    for event, number in events:
        disturb(world, event, number)
    for number in (0, 1):
        world.cluster.change_spec(CHAT, lambda spec: spec["pools"][number].update(replicas=1))  # noqa: B023 - called here
    world.cluster.advance(3600)
    world.rest(25)
    assert (world.status["phase"], world.status["ready"]) == ("Serving", "2/2")
    assert told(world) == ("True", "Paired")
    assert len(secrets(world)) == 1
    assert world.cluster.plan(CHAT).empty


def disturb(world: Serving, event: str, number: int) -> None:
    cluster, engines = world.cluster, world.cluster.pods("engine")
    key = {"deployment": CHAT, "pre": PRE, "dec": DEC}.get(event)
    if key is not None and key in cluster.objects:
        with contextlib.suppress(Crash):
            cluster.reconcile(key, crash_after=number if number < 6 else None)
    elif event == "run":
        for pod in [*engines, *cluster.pods("router")][: number + 1]:
            cluster.run(pod)
    elif event == "snapshots":
        world.take_snapshots()
    elif event == "drain":
        world.drain_engines()
    elif event == "collect":
        cluster.collect()
    elif event in ("kill", "vanish") and engines:
        getattr(cluster, event)(engines[number % len(engines)])
    elif event == "checkpoint":
        world.checkpoint(10 * (number + 1))
    elif event == "scale":
        cluster.change_spec(CHAT, lambda spec: spec["pools"][number % 2].update(replicas=number % 3))
    elif event == "secret" and secrets(world):
        cluster.delete(Key("Secret", "default", secrets(world)[0]["metadata"]["name"]))
    elif event == "wait":
        cluster.advance(60 * number)


def test_each_rank_of_each_copy_in_a_pod_has_two_ports_for_blocks() -> None:
    assert list(transfer_ports([{}], 8101)) == [8101, 8102, 8103]
    configs = [{"parallelism": {"tensor": 1}}, {"parallelism": {"tensor": 2}}]
    assert list(transfer_ports(configs, 8101)) == [8101, 8102, 8103, 8104, 8105]
    copies: dict[str, Any] = {"parallelism": {"data": 4, "tensor": 2}}
    for pods, last in ((1, 8120), (2, 8110), (4, 8105), (8, 8105)):
        assert list(transfer_ports([copies | {"replica": {"pods": pods}}], 8101)) == list(range(8101, last + 1))


def test_every_data_rank_of_both_pools_is_a_partner_and_a_replica_leaves_with_all_of_them() -> None:
    """Two copies in each of two pods that compute prompts; copies of two pods each that answer."""
    pre = {**POOLS[0], "podsPerReplica": 2, "ranksPerPod": 2, "replicas": 2, "parallelism": {"data": 4}}
    dec = {**POOLS[1], "podsPerReplica": 4, "parallelism": {"data": 2, "tensor": 2}}
    world = serving(pools=[pre, dec])
    world.cluster.settings = Settings(network_policies=NetworkPolicies(operator_namespace="stoker-system"))
    world.rest(12)
    assert (world.status["phase"], world.status["ready"]) == ("Serving", "3/3"), "replicas are counted"
    assert told(world) == ("True", "Paired")
    assert condition_of(world.status, "Disaggregated")["message"] == "ready engines: 4 prefill and 2 decode"
    assert Counter(entry["role"] for entry in world.snapshot()["backends"]) == {"prefill": 4, "decode": 2}
    for pool, ports in (("pre", 6), ("dec", 5)):
        policies = world.cluster.of_kind("NetworkPolicy")
        (policy,) = (found for found in policies if found["metadata"]["labels"].get("stoker.dev/pool") == pool)
        opened = [rule["ports"][0]["port"] for rule in policy["spec"]["ingress"] if "ports" in rule]
        assert opened[1:] == list(range(8101, 8101 + ports))
        for number, pod in enumerate(sorted(engines_of(world, pool), key=lambda pod: str(pod["metadata"]["name"]))):
            config = share_of_pod(config_of(world, pod))
            assert (config.role, config.parallelism.data) == {"pre": ("prefill", 2), "dec": ("decode", 1)}[pool], number
            refuse_transfer(config, "cpu")

    world.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=1))
    world.rest(5)
    drained = {name for name, path, _ in world.cluster.calls if path == "/drain"}
    assert len(drained) == 2, "both endpoints of the replica that leaves"
    assert (told(world), world.status["ready"]) == (("True", "Paired"), "2/2")
    victim = engines_of(world, "dec")[-1]
    world.cluster.kill(victim)
    world.cluster.settle_once()
    assert told(world) == ("False", "NoDecodeEngine"), "a lost member takes the whole replica with it"
    world.cluster.advance(120)
    world.rest(12)
    assert (told(world), world.status["ready"]) == (("True", "Paired"), "2/2")


def config_of(world: Serving, pod: Object) -> EngineConfig:
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    stored = world.cluster.objects[Key("ConfigMap", "default", volumes["stoker-config"]["configMap"]["name"])]
    return parse(EngineConfig, json.loads(stored["data"]["config.json"]), "config")


def test_of_two_pools_the_one_that_is_not_ready_is_named() -> None:
    world = serving()
    world.rest(10)
    world.cluster.vanish(engines_of(world, "dec")[0])
    for _ in range(2):
        world.cluster.settle_once()
    assert (world.status["phase"], world.status["ready"]) == ("Scaling", "1/2")
    assert world.status["message"].startswith("pool dec: 0 of 1 replicas are ready")
