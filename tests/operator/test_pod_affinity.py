"""Affinity between the pods of a gang: it selects the same units that `place` keeps together."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.domain.placement.gang import Gang, Level
from stoker.operator.domain.placement.pod_affinity import kept_together
from stoker.operator.domain.plan import Object

OWN = {"job": "a", "attempt": "1"}
MODES = st.sampled_from(("Required", "Preferred"))
SIZES = st.integers(1, 3)


def pod(**spec: Any) -> Object:
    return {"metadata": {"name": "p", "labels": {**OWN, "x": "y"}}, "spec": spec}


def terms(found: Object) -> dict[str, dict[str, str]]:
    """What each term selects, by its key."""
    affinity = found["spec"].get("affinity", {}).get("podAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", [])
    preferred = affinity.get("preferredDuringSchedulingIgnoredDuringExecution", [])
    all_terms = [*required, *(one["podAffinityTerm"] for one in preferred)]
    return {one["topologyKey"]: one["labelSelector"]["matchLabels"] for one in all_terms}


def units(gang: Gang, number: int) -> tuple[set[int], ...]:
    """The pods of each unit that a pod belongs to, read off the order in which `place` lays them."""
    order = list(gang.pods_by_replica())
    at, size = order.index(number), gang.parts * gang.stages
    group, replica = at // gang.parts * gang.parts, at // size * size
    return {*order[group : group + gang.parts]}, {*order[replica : replica + size]}, {*order}


@given(SIZES, SIZES, SIZES, st.lists(MODES, max_size=3))
def test_the_terms_of_a_pod_select_its_units(parts: int, stages: int, replicas: int, modes: list[Any]) -> None:
    gang = Gang(requests={}, parts=parts, stages=stages, replicas=replicas)
    levels = [Level(f"level-{index}", mode) for index, mode in enumerate(modes)]
    pods = [kept_together(pod(), levels, gang, number, OWN) for number in range(gang.size)]
    for number, (index, level) in product(range(gang.size), enumerate(levels)):
        unit = units(gang, number)[index]
        selected = terms(pods[number]).get(level.key)
        assert (selected is None) == (len(unit) == 1), "a unit of one pod needs no term"
        if selected is not None:
            assert {
                at for at, other in enumerate(pods) if selected.items() <= other["metadata"]["labels"].items()
            } == unit


def test_terms_stand_behind_those_of_the_template() -> None:
    users: dict[str, Any] = {
        "nodeAffinity": {"a": 1},
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "podAffinityTerm": {}}]},
    }
    gang = Gang(requests={}, parts=2, replicas=2)
    found = kept_together(pod(affinity=users), [Level("clique"), Level("rack", "Preferred")], gang, 3, OWN)
    whole = found["spec"]["affinity"]
    assert whole["nodeAffinity"] == {"a": 1}
    assert [one["weight"] for one in whole["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]] == [1, 50]
    assert len(whole["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]) == 1
    assert found["metadata"]["labels"] == {
        **OWN, "x": "y", "stoker.dev/tensor-group": "1", "stoker.dev/model-replica": "1",
    }  # fmt: skip
    assert users["podAffinity"].keys() == {"preferredDuringSchedulingIgnoredDuringExecution"}, "not changed in place"


def test_without_levels_a_pod_stays_as_it_is() -> None:
    own = pod(affinity={"podAffinity": {}})
    assert kept_together(own, [], Gang(requests={}, parts=2), 0, OWN) is own
