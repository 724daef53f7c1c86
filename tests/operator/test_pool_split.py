"""Replicas of several revisions: invariants at each step, the end of repeated steps, agreement with the single step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.operator.reconcile.enginepool.split import RevisionStep, next_split, wanted_by_revision
from stoker.operator.reconcile.enginepool.step import Counts, next_step

SMALL = st.integers(0, 6)
PODS = st.tuples(SMALL, SMALL)
NAMES = ("new", "old", "older")


@given(replicas=st.integers(0, 40), surge=SMALL, percent=st.integers(1, 99))
def test_each_revision_with_a_share_has_a_replica_and_no_more_than_its_share_rounded_up(
    replicas: int, surge: int, percent: int
) -> None:
    wanted = wanted_by_revision(replicas, surge, [("new", percent), ("old", 100 - percent), ("older", 0)])
    assert wanted["older"] == 0
    if replicas == 0:
        assert set(wanted.values()) == {0}
        return
    for name, share in (("new", percent), ("old", 100 - percent)):
        assert 1 <= wanted[name] <= max(-(-replicas * share // 100), 1) + (surge == 0)
    total = sum(wanted.values())
    assert max(replicas, 2 if replicas else 0) <= max(total, replicas)
    assert total <= max(replicas + min(surge, 1), 2)


@given(replicas=SMALL, surge=SMALL, unavailable=SMALL, counts=st.builds(Counts, SMALL, SMALL, SMALL, SMALL))
def test_with_one_revision_it_decides_as_the_single_step(
    replicas: int, surge: int, unavailable: int, counts: Counts
) -> None:
    pods = {"new": (counts.new_ready, counts.new_unready), "old": (counts.old_ready, counts.old_unready)}
    steps = next_split(replicas, surge, unavailable, {"new": replicas}, pods)
    single = next_step(replicas, surge, unavailable, counts)
    new, old = steps["new"], steps["old"]
    assert (new.create, new.drop_unready, old.drop_unready) == (
        single.create_new, single.drop_new_unready, single.drop_old_unready,
    )  # fmt: skip
    enough = counts.new_ready - single.drain_new + counts.old_ready >= replicas - unavailable
    assert not enough or (new.drain + old.drain) == single.drain_new + single.drain_old


@given(
    replicas=SMALL, surge=SMALL, unavailable=SMALL, percent=st.integers(1, 99),
    pods=st.fixed_dictionaries(dict.fromkeys(NAMES, PODS)),
)  # fmt: skip
def test_steps_keep_the_budget_and_end_at_the_wanted_replicas(
    replicas: int, surge: int, unavailable: int, percent: int, pods: dict[str, tuple[int, int]]
) -> None:
    wanted = wanted_by_revision(replicas, surge, [("new", percent), ("old", 100 - percent)])
    most = max(replicas + (surge or (0 if unavailable else 1)), sum(wanted.values()))
    for _ in range(80):
        steps = next_split(replicas, surge, unavailable, wanted, pods)
        if not any(step != RevisionStep() for step in steps.values()) and not any(pods[name][1] for name in NAMES):
            break
        after = {
            name: (ready - steps[name].drain, unready - steps[name].drop_unready)
            for name, (ready, unready) in pods.items()
        }
        made = sum(step.create for step in steps.values())
        assert made == 0 or sum(map(sum, after.values())) + sum(s.drain for s in steps.values()) + made <= most
        drained = sum(step.drain for step in steps.values())
        assert drained == 0 or sum(ready for ready, _ in after.values()) >= replicas - unavailable
        pods = {name: (after[name][0] + after[name][1] + steps[name].create, 0) for name in NAMES}
    assert {name: ready for name, (ready, _) in pods.items()} == {"older": 0, **wanted}


def test_replicas_of_revisions_without_a_share_go_before_those_of_others() -> None:
    steps = next_split(4, 1, 0, {"new": 1, "old": 2}, {"new": (1, 0), "old": (3, 0), "older": (1, 0)})
    assert {name: step.drain for name, step in steps.items()} == {"new": 0, "old": 0, "older": 1}
