"""One silent node is lost after a while; many at once are an outage, and none of them is."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.domain.lost_nodes import Carrier, NodeLimits, NodeLoss, NodeSilence, Outage, classify, note_silence

LIMITS = NodeLimits(lost_s=10, outage_share=0.5, outage_nodes=3)


@dataclass
class Looks:
    """A sequence of looks at nodes."""

    limits: NodeLimits = LIMITS
    known: NodeSilence = field(default_factory=NodeSilence)
    now_s: float = 0.0

    def after(self, seconds: float, nodes: str, *, heard: bool = True, zones: str = "") -> NodeLoss:
        """Return the state after one look.

        Capital letters are nodes that answer, small ones are silent; `zones` has a letter for each.
        """
        self.now_s += seconds
        places = zones or " " * len(nodes)
        carriers = {
            name.lower(): Carrier(name.islower(), zone.strip()) for name, zone in zip(nodes, places, strict=True)
        }
        self.known = note_silence(self.known, carriers, self.now_s, self.limits, watched=heard)
        return classify(self.known, self.now_s, self.limits)


def test_a_silent_node_is_lost_when_its_time_is_over() -> None:
    looks = Looks()
    assert looks.after(0, "aBCD") == NodeLoss(left_s={"a": 10})
    assert looks.after(6, "aBCD") == NodeLoss(left_s={"a": 4})
    assert looks.after(4, "aBCD") == NodeLoss(lost=frozenset("a"))


def test_a_node_that_spoke_meanwhile_has_its_whole_time_again() -> None:
    looks = Looks()
    looks.after(0, "aB")
    looks.after(9, "AB")
    assert looks.after(1, "aB") == NodeLoss(left_s={"a": 10})


def test_more_than_half_of_the_nodes_silent_at_once_is_an_outage() -> None:
    looks = Looks()
    held = looks.after(0, "abcDE")
    assert held == NodeLoss(outages=dict.fromkeys("abc", Outage(silent=3, nodes=5)))
    assert looks.after(3600, "abcDE") == held
    assert held.outages["a"].text == "3 of 5 nodes with pods are silent at once"


@pytest.mark.parametrize(
    ("nodes", "limits"),
    [
        ("abcDEF", LIMITS),
        ("ab", LIMITS),
        ("abcde", NodeLimits(lost_s=10, outage_share=1, outage_nodes=1)),
    ],
    ids=["just half", "too few", "outages are turned off"],
)
def test_fewer_are_lost_one_by_one(nodes: str, limits: NodeLimits) -> None:
    looks = Looks(limits)
    looks.after(0, nodes)
    assert looks.after(10, nodes).lost == frozenset(name for name in nodes if name.islower())


def test_an_outage_of_one_zone_holds_only_there() -> None:
    looks = Looks()
    looks.after(0, "abcdEFGHIJ", zones="xxxyyyyyyy")
    later = looks.after(10, "abcdEFGHIJ", zones="xxxyyyyyyy")
    assert later.lost == {"d"}
    assert later.outages == dict.fromkeys("abc", Outage(silent=3, nodes=3, zone="x"))
    assert later.outages["a"].text == "3 of 3 nodes of zone x with pods are silent at once"


def test_the_nodes_of_a_zone_that_stays_silent_are_lost_in_the_end() -> None:
    looks = Looks(NodeLimits(lost_s=10, outage_share=0.5, outage_nodes=3, zone_outage_s=100))
    looks.after(0, "abcDEFGH", zones="xxxyyyyy")
    assert looks.after(60, "abcDEFGH", zones="xxxyyyyy").left_s == dict.fromkeys("abc", 40)
    assert looks.after(20, "abcDEFGH", heard=False, zones="xxxyyyyy").lost == frozenset(), "no word can arrive"
    assert looks.after(99, "abcDEFGH", zones="xxxyyyyy").lost == frozenset(), "the count began anew"
    looks.after(1, "aBcDEFGH", zones="xxxyyyyy")
    looks.after(1, "abcDEFGH", zones="xxxyyyyy")
    later = looks.after(99, "abcDEFGH", zones="xxxyyyyy")
    assert later.lost == frozenset(), "a node that spoke ended the outage of its zone"
    dead = looks.after(1, "abcDEFGH", zones="xxxyyyyy")
    assert (dead.lost, dead.outages) == (frozenset("abc"), {})


def test_an_outage_of_all_nodes_never_ends_by_itself() -> None:
    looks = Looks(NodeLimits(lost_s=10, outage_share=0.5, outage_nodes=3, zone_outage_s=100))
    looks.after(0, "abcD")
    assert looks.after(1000, "abcD").lost == frozenset()


def test_after_an_outage_the_nodes_that_stay_silent_have_their_whole_time() -> None:
    looks = Looks()
    looks.after(0, "abcdE")
    assert looks.after(300, "abCDE") == NodeLoss(left_s={"a": 10, "b": 10})
    assert looks.after(10, "aBCDE") == NodeLoss(lost=frozenset("a"))


def test_a_node_that_was_about_to_be_lost_is_not_once_others_follow() -> None:
    looks = Looks()
    looks.after(0, "aBCDE")
    looks.after(9, "abcDE")
    assert looks.after(1, "abcDE").lost == frozenset()


def test_time_without_a_watch_counts_for_no_node() -> None:
    looks = Looks()
    looks.after(0, "aB")
    assert looks.after(60, "aB", heard=False) == NodeLoss(left_s={"a": 10})
    assert looks.after(60, "aB") == NodeLoss(left_s={"a": 10})
    assert looks.after(10, "aB") == NodeLoss(lost=frozenset("a"))


def test_without_a_waiting_time_too_nothing_is_lost_unheard_or_in_an_outage() -> None:
    looks = Looks(NodeLimits(lost_s=0, outage_share=0.5, outage_nodes=3))
    assert looks.after(0, "aBCD") == NodeLoss(lost=frozenset("a"))
    assert looks.after(0, "aBCD", heard=False) == NodeLoss(left_s={"a": 1})
    assert looks.after(0, "abcD", heard=True).lost == frozenset()


@dataclass(frozen=True)
class Moment:
    """One look of a random history."""

    passed_s: int
    silent: frozenset[int]
    heard: bool


NODES = {0: "", 1: "", 2: "x", 3: "x", 4: "x", 5: "y", 6: "y", 7: "y"}
MOMENTS = st.lists(
    st.builds(Moment, st.integers(0, 7), st.frozensets(st.sampled_from(sorted(NODES))), st.booleans() | st.just(True)),
    min_size=1,
    max_size=25,
)
ANY_LIMITS = st.builds(NodeLimits, st.integers(0, 12), st.sampled_from([0.2, 0.5, 0.75, 1.0]), st.integers(1, 4))


def in_outage(node: int, moment: Moment, limits: NodeLimits) -> bool:
    """Return whether the documentation's words call this an outage."""
    groups = [set(NODES), {other for other, zone in NODES.items() if zone and zone == NODES[node]}]
    for group in groups:
        silent = len(group & moment.silent)
        if node in group and silent >= limits.outage_nodes and silent > limits.outage_share * len(group):
            return True
    return False


@given(MOMENTS, ANY_LIMITS)
def test_a_node_is_lost_exactly_when_it_was_silent_heard_and_alone_for_long_enough(
    moments: list[Moment], limits: NodeLimits
) -> None:
    known, now_s = NodeSilence(), 0.0
    quiet_since: dict[int, float] = {}
    before: Moment | None = None
    for moment in moments:
        now_s += moment.passed_s
        carriers = {str(node): Carrier(node in moment.silent, zone) for node, zone in NODES.items()}
        known = note_silence(known, carriers, now_s, limits, watched=moment.heard)
        verdict = classify(known, now_s, limits)
        for node in NODES:
            good = [
                found is not None and node in found.silent and found.heard and not in_outage(node, found, limits)
                for found in (before, moment)
            ]
            if not all(good):
                quiet_since[node] = now_s
            expected = good[1] and now_s - quiet_since[node] >= limits.lost_s
            assert (str(node) in verdict.lost) is expected
            assert (str(node) in verdict.outages) is (node in moment.silent and in_outage(node, moment, limits))
        places = [set(verdict.lost), set(verdict.left_s), set(verdict.outages)]
        assert sorted(name for place in places for name in place) == sorted(map(str, moment.silent))
        before = moment
