"""Snapshots and policies: accepted snapshots, chosen engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pod.config_file import ConfigError
from stoker.router.node import Node
from stoker.router.policy import Locality, least_pending, policy_named, power_of_two, random_one, round_robin
from stoker.router.snapshot import parse_snapshot
from stoker.router.work import NO_WORK

GOOD = {"url": "http://10.0.0.7:8000", "pod_uid": "a"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param({"backends": []}, "version is missing", id="no version"),
        pytest.param({"version": -1, "backends": []}, "version: .* greater than or equal to 0", id="negative version"),
        pytest.param({"version": 1, "backends": [{**GOOD, "pod_uid": ""}]}, "backends.0.pod_uid", id="no pod uid"),
        pytest.param(
            {"version": 1, "backends": [{**GOOD, "url": "https://a"}]}, "http://HOST:PORT is needed", id="https"
        ),
        pytest.param(
            {"version": 1, "backends": [{**GOOD, "url": "http://a/x"}]}, "http://HOST:PORT is needed", id="path"
        ),
        pytest.param({"version": 1, "backends": [{**GOOD, "role": "both"}]}, "'decode'", id="role"),
        pytest.param(
            {"version": 1, "backends": [GOOD, {**GOOD, "pod_uid": "b"}]}, "listed twice", id="same address twice"
        ),
        pytest.param(
            {"version": 1, "backends": [{**GOOD, "weight": 2}]}, "unknown key backends.0.weight", id="unknown key"
        ),
    ],
)
def test_a_wrong_snapshot_is_refused_with_the_field(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_snapshot(body)


def test_an_address_is_read_from_the_url() -> None:
    entry = parse_snapshot({"version": 3, "backends": [GOOD]}).backends[0]
    assert (entry.address, entry.key) == (("10.0.0.7", 8000), ("http://10.0.0.7:8000", "a"))


@dataclass(frozen=True)
class Load:
    name: str
    pending: int


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 100))
def test_least_pending_always_takes_a_least_loaded_backend(loads: list[int], turn: int) -> None:
    chosen = least_pending([Load(str(i), load) for i, load in enumerate(loads)], turn)
    assert chosen.pending == min(loads)


@pytest.mark.parametrize("policy", [round_robin, least_pending])
def test_equally_loaded_backends_are_used_evenly(policy: Any) -> None:
    backends = [Load(name, 0) for name in "abc"]
    assert Counter(policy(backends, turn).name for turn in range(30)) == {"a": 10, "b": 10, "c": 10}


@pytest.mark.parametrize("policy", [power_of_two, random_one])
def test_equally_loaded_backends_are_drawn_about_equally_often(policy: Any) -> None:
    backends = [Load(name, 1) for name in "abc"]
    counts = Counter(policy(backends, turn).name for turn in range(3000))
    assert all(900 < counts[name] < 1100 for name in "abc")


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9, unique=True), st.integers(0, 10**6))
def test_power_of_two_never_takes_the_most_loaded_backend(loads: list[int], turn: int) -> None:
    assert power_of_two([Load(str(i), load) for i, load in enumerate(loads)], turn).pending < max(loads)


def test_power_of_two_draws_every_pair() -> None:
    loads = [Load(name, pending) for pending, name in enumerate("abcd")]
    chosen = Counter(power_of_two(loads, turn).name for turn in range(6000))
    expected = {"a": 3000, "b": 2000, "c": 1000}  # each of six pairs equally often, the less loaded of it wins
    assert chosen.keys() == expected.keys()
    assert all(abs(chosen[name] - count) < 200 for name, count in expected.items())


def test_one_backend_is_always_chosen() -> None:
    assert power_of_two([Load("a", 9)], 5).name == "a"


def test_a_policy_that_is_not_built_is_refused() -> None:
    with pytest.raises(ValueError, match="not supported yet: policy fastest"):
        policy_named("fastest")


@dataclass
class Placed:
    name: str
    node: Node
    pending: int = 0


HERE = Node("n1", "z1")
"""Of the router."""


@pytest.mark.parametrize(
    ("pending", "chosen"),
    [
        pytest.param((0, 0, 0), "same node", id="the nearest of idle ones"),
        pytest.param((1, 0, 0), "same node", id="a little more is taken near"),
        pytest.param((3, 0, 0), "same zone", id="then the zone"),
        pytest.param((9, 9, 0), "elsewhere", id="an idle one far away"),
        pytest.param((9, 9, 9), "same node", id="the nearest of busy ones"),
    ],
)
def test_locality_prices_distance_in_pending_requests(pending: tuple[int, ...], chosen: str) -> None:
    nodes = {"same node": HERE, "same zone": Node("n2", "z1"), "elsewhere": Node("n3", "z2")}
    ready = [Placed(name, node, number) for (name, node), number in zip(nodes.items(), pending, strict=True)]
    assert Locality(HERE)(ready, 3).name == chosen
    assert policy_named("locality", HERE)(ready, 3, NO_WORK).name == chosen


def test_unknown_places_are_all_equally_far() -> None:
    ready = [Placed(name, Node()) for name in "abc"]
    assert {Locality(Node())(ready, turn).name for turn in range(3)} == {"a", "b", "c"}
