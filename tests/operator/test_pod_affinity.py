"""Affinity between the pods of a gang: a scheduler that takes one pod at a time keeps the levels that `place` keeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.node_capacity import HOSTNAME, NodeCapacity
from stoker.operator.domain.placement.place import Placement, place
from stoker.operator.domain.placement.pod_affinity import kept_together, only_preferred
from stoker.operator.domain.plan import Object
from testing.operator.small_scheduler import schedule

OWN = {"job": "a", "attempt": "1"}
REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)
MODES = st.lists(st.sampled_from(("Required", "Preferred")), max_size=3)
SIZES = st.integers(1, 3)
KEYS = ("clique", "rack", "zone")
GANGS = st.builds(Gang, requests=st.just({"gpu": 1}), parts=SIZES, stages=SIZES, replicas=st.integers(1, 2))


def pod(number: int = 0, **spec: Any) -> Object:
    labels = {**OWN, "x": "y", "stoker.dev/node-rank": str(number)}
    return {"metadata": {"name": str(number), "labels": labels}, "spec": spec}


def levels_of(modes: list[Any]) -> list[Level]:
    return [Level(key, mode) for key, mode in zip(KEYS, modes, strict=False)]


def gang_pods(gang: Gang, levels: list[Level], *, ordered: bool = True, **spec: Any) -> list[Object]:
    return [kept_together(pod(at, **spec), levels, gang, at, OWN, ordered=ordered) for at in range(gang.size)]


def units(gang: Gang, index: int) -> list[list[int]]:
    """The pods of each unit of a level, read off the order in which `place` lays them."""
    order, size = list(gang.pods_by_replica()), (gang.parts, gang.parts * gang.stages, gang.size)[index]
    return [order[start : start + size] for start in range(0, gang.size, size)]


@st.composite
def clusters(draw: Callable[..., Any]) -> list[NodeCapacity]:
    """Nodes with labels that need not be nested, some of them missing."""
    label = st.sampled_from(("", "0", "1"))
    found = [{key: draw(label) for key in KEYS} for _ in range(draw(st.integers(1, 6)))]
    return [
        NodeCapacity(
            name=f"n{at}",
            free={"gpu": draw(st.integers(0, 6)), "pods": 10},
            labels={HOSTNAME: f"n{at}", **{key: value for key, value in labels.items() if value}},
        )
        for at, labels in enumerate(found)
    ]


def together(gang: Gang, levels: list[Level], nodes: list[NodeCapacity], chosen: dict[str, str]) -> dict[str, bool]:
    """Whether the scheduled pods of every unit share one value of each level, by the level's key."""
    labels = {node.name: node.labels for node in nodes}
    found = {}
    for index, level in enumerate(levels):
        values = [
            {labels[chosen[str(at)]].get(level.key) for at in unit if str(at) in chosen} for unit in units(gang, index)
        ]
        found[level.key] = all(len(domains) <= 1 and None not in domains for domains in values)
    return found


@given(GANGS, MODES, clusters(), st.booleans(), st.randoms(use_true_random=False))
def test_any_scheduler_of_single_pods_keeps_every_required_level(
    gang: Gang, modes: list[Any], nodes: list[NodeCapacity], ordered: bool, random: Any
) -> None:
    levels = levels_of(modes)
    chosen = schedule(gang_pods(gang, levels, ordered=ordered), nodes, gang.requests, random)
    weak = only_preferred({}, levels, gang, ordered=ordered)
    kept = together(gang, levels, nodes, chosen)
    assert all(kept[level.key] for level in levels if level.mode == "Required" and level.key not in weak)
    assert not (ordered and weak)
    if ordered and len(chosen) == gang.size:
        assert isinstance(place(gang, nodes, levels), Placement)


@given(GANGS, MODES, st.booleans(), st.randoms(use_true_random=False))
def test_a_gang_alone_in_roomy_domains_is_scheduled_whole(
    gang: Gang, modes: list[Any], ordered: bool, random: Any
) -> None:
    nodes = [
        NodeCapacity(
            name=f"n{at}",
            free={"gpu": gang.size, "pods": 50},
            labels={HOSTNAME: f"n{at}", "clique": f"{at // 2}", "rack": f"{at // 4}", "zone": "z"},
        )
        for at in range(8)
    ]
    found = schedule(gang_pods(gang, levels_of(modes), ordered=ordered), nodes, gang.requests, random)
    assert len(found) == gang.size


def test_two_required_units_hold_together_where_terms_for_each_would_hold_for_neither() -> None:
    """Kubernetes counts pods that match every term: with a term per unit each tensor group chose a rack of its own."""
    gang, levels = Gang(requests={"gpu": 1}, parts=2, stages=2), [Level("clique"), Level("rack")]
    pods = gang_pods(gang, levels)
    selected = [
        {one["topologyKey"]: one["labelSelector"]["matchLabels"]["stoker.dev/node-rank"] for one in terms}
        for terms in (found["spec"]["affinity"]["podAffinity"].get(REQUIRED, ()) for found in pods[1:])
    ]
    assert selected == [{"clique": "0", "rack": "0"}, {"rack": "0"}, {"clique": "2", "rack": "2"}]
    assert "podAffinity" not in pods[0]["spec"]["affinity"], "the first pod waits for none"


@given(GANGS, MODES)
def test_preferred_terms_select_the_units_of_their_level(gang: Gang, modes: list[Any]) -> None:
    levels = levels_of(modes)
    pods = gang_pods(gang, levels)
    for number, (index, level) in product(range(gang.size), enumerate(levels)):
        if level.mode == "Required":
            continue
        (unit,) = (found for found in units(gang, index) if number in found)
        wishes = pods[number]["spec"]["affinity"].get("podAffinity", {}).get(PREFERRED, ())
        terms = [one for one in wishes if one["podAffinityTerm"]["topologyKey"] == level.key]
        assert [one["weight"] for one in terms] == [(100, 50, 25)[index]] * (len(unit) > 1)
        for one in terms:
            selector = one["podAffinityTerm"]["labelSelector"]["matchLabels"].items()
            assert {at for at, other in enumerate(pods) if selector <= other["metadata"]["labels"].items()} == {*unit}


def test_terms_stand_behind_those_of_the_template() -> None:
    users: dict[str, Any] = {
        "nodeAffinity": {"a": 1, REQUIRED: {"nodeSelectorTerms": [{"matchFields": ["f"]}, {}]}},
        "podAffinity": {PREFERRED: [{"weight": 1, "podAffinityTerm": {}}]},
    }
    gang = Gang(requests={}, parts=2, replicas=2)
    levels = [Level("clique"), Level("rack", "Preferred")]
    found = kept_together(pod(3, affinity=users), levels, gang, 3, OWN)
    whole = found["spec"]["affinity"]
    labelled = {"matchFields": ["f"], "matchExpressions": [{"key": "clique", "operator": "Exists"}]}
    assert whole["nodeAffinity"] == {"a": 1, REQUIRED: {"nodeSelectorTerms": [labelled, {}]}}
    assert [one["weight"] for one in whole["podAffinity"][PREFERRED]] == [1, 50]
    assert len(whole["podAffinity"][REQUIRED]) == 1
    units_ = {"stoker.dev/tensor-group": "1", "stoker.dev/model-replica": "1"}
    assert units_.items() <= found["metadata"]["labels"].items()
    assert users["podAffinity"].keys() == {PREFERRED}, "not changed in place"


@pytest.mark.parametrize(
    ("own", "ordered", "weak"),
    [
        ([], True, ()),
        ([], False, ("rack", "zone")),
        ([{"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "zone"}], True, KEYS),
    ],
    ids=["one-by-one", "whole-gangs", "required-terms-of-the-template"],
)
def test_required_levels_that_cannot_hold_are_preferred_and_named(
    own: list[Any], ordered: bool, weak: tuple[str, ...]
) -> None:
    gang, levels = Gang(requests={}, parts=2, stages=2, replicas=2), levels_of(["Required"] * 3)
    spec = {"affinity": {"podAffinity": {REQUIRED: own}}} if own else {}
    found = kept_together(pod(7, **spec), levels, gang, 7, OWN, ordered=ordered)["spec"]["affinity"]["podAffinity"]
    assert only_preferred(spec, levels, gang, ordered=ordered) == weak
    assert [one["podAffinityTerm"]["topologyKey"] for one in found.get(PREFERRED, ())] == list(weak)
    assert found[REQUIRED][: len(own)] == own


def test_without_levels_a_pod_stays_as_it_is() -> None:
    own = pod(affinity={"podAffinity": {}})
    assert kept_together(own, [], Gang(requests={}, parts=2), 0, OWN) is own
