"""Canaries on the simulated cluster: steps, roll back, pause, abort and promotion by hand, and any disturbance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stoker.operator.domain.plan import Key
from stoker.operator.reconcile.enginepool.step import resolve
from stoker.pod.causes import Cause
from testing.operator.canary_world import CanaryServing, Quality
from testing.operator.serving_world import CHAT, EVENTS, POOL, condition_of, disturb, renamed_as_by_an_older_version


def target_of(serving: CanaryServing) -> str:
    return str(serving.rollout["toRevision"])


def rounds(serving: CanaryServing, number: int) -> None:
    for _ in range(number):
        serving.round()


def begun(serving: CanaryServing, percent: int = 10) -> tuple[str, str]:
    """Run until the new revision has `percent` of the traffic; return (old, new)."""
    old = serving.started()
    for _ in range(200):
        serving.round()
        if serving.canary.get("percent") == percent:
            return old, target_of(serving)
    raise AssertionError(serving.status)


def rolled_back(serving: CanaryServing) -> tuple[str, str]:
    """Run until a revision with too many errors is rolled back; return (old, bad)."""
    old, bad = begun(serving)
    serving.quality[bad] = Quality(error_percent=50)
    rounds(serving, 30)
    assert serving.rollout["phase"] == "RolledBack"
    return old, bad


def test_a_good_revision_gets_every_share_in_turn_and_replaces_the_old_one() -> None:
    serving = CanaryServing()
    old = serving.started()
    seen: list[int] = []
    for _ in range(120):
        serving.round()
        seen.append(serving.canary.get("percent", 0))
        usable = [backend for backend in serving.snapshot()["backends"] if not backend["draining"]]
        assert len(usable) >= 4
    assert list(dict.fromkeys(seen)) == [0, 10, 50, 100]
    new = serving.status["currentRevision"]
    assert new != old
    assert (serving.status["phase"], serving.rollout["phase"], serving.status["ready"]) == (
        "Serving",
        "Completed",
        "4/4",
    )
    assert (serving.engines(old), len(serving.engines(new))) == ([], 4)
    assert serving.shares == {}, "after a canary every revision gets requests"
    assert serving.cluster.events.count("CanaryStep") == 3
    assert serving.cluster.plan(CHAT).empty
    assert serving.cluster.plan(POOL).empty


def test_the_replicas_follow_the_share_and_the_old_revision_keeps_one_until_the_end() -> None:
    serving = CanaryServing()
    old, new = begun(serving)
    assert (len(serving.engines(new)), len(serving.engines(old))) >= (1, 3)
    for percent, expected in ((50, (2, 2)), (100, (4, 1))):
        for _ in range(200):
            if serving.canary["percent"] == percent:
                break
            serving.round()
        assert (len(serving.engines(new)), len(serving.engines(old))) >= expected
        assert {found["name"]: found["share"] for found in serving.status["revisions"]} == {
            new: percent, old: 100 - percent,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("quality", "reason"),
    [
        pytest.param(Quality(error_percent=10), "errorRate at 10 %: 10.00% is above 2.00%", id="errors"),
        pytest.param(Quality(first_token_s=0.3), "ttftP95Ms at 10 %", id="slow first tokens"),
        pytest.param(Quality(queue_s=0.2), "queueP95Ms at 10 %", id="long queues"),
    ],
)
def test_a_failed_gate_takes_the_traffic_away_in_seconds_and_for_good(quality: Quality, reason: str) -> None:
    serving = CanaryServing()
    old = serving.started()
    serving.round()
    serving.quality[target_of(serving)] = quality
    new = target_of(serving)
    for _ in range(200):
        serving.round()
        if serving.answered[new]:
            break
    failing_since = serving.cluster.now
    for _ in range(200):
        if serving.shares[new] == 0:
            break
        serving.round()
    assert (serving.cluster.now - failing_since).total_seconds() <= 10
    assert serving.shares == {new: 0, old: 100}
    answered = serving.answered[new]
    serving.quality[new] = Quality()
    rounds(serving, 60)
    assert serving.answered[new] == answered, "it gets no request any more"
    assert (serving.rollout["phase"], serving.status["currentRevision"]) == ("RolledBack", old)
    assert (serving.engines(new), len(serving.engines(old))) == ([], 4)
    assert reason in serving.status["message"]
    assert serving.status["phase"] == "Serving"
    assert condition_of(serving.status, "Stalled")["status"] == "True"
    assert serving.cluster.events.count("CanaryFailed") == 1
    gate = next(found for found in serving.canary["gates"] if found["verdict"] == "Failed")
    assert gate["samples"] >= 20
    assert serving.cluster.plan(CHAT).empty


def test_a_revision_whose_pools_do_not_reach_each_other_is_rolled_back_although_no_client_sees_it() -> None:
    pools = [{"name": role[:3], "role": role, "replicas": 4} for role in ("prefill", "decode")]
    serving = CanaryServing(pools=pools)
    old = serving.started()
    serving.round()
    new = target_of(serving)
    serving.quality[new] = Quality(failed_split_percent=20)
    for _ in range(200):
        serving.round()
        if serving.rollout["phase"] == "RolledBack":
            break
    assert (serving.rollout["phase"], serving.status["currentRevision"]) == ("RolledBack", old)
    (gate,) = [found for found in serving.canary["gates"] if found["verdict"] == "Failed"]
    assert (gate["metric"], float(gate["value"]), float(gate["base"])) == ("transferErrorRate", 0.2, 0)
    assert "GateFailed: transferErrorRate at 10 %: " in serving.status["message"]


def test_the_next_revision_gets_its_own_canary_after_a_roll_back() -> None:
    serving = CanaryServing()
    old, bad = rolled_back(serving)
    serving.checkpoint(30)
    rounds(serving, 140)
    assert serving.status["currentCheckpoint"]["step"] == 30
    assert serving.status["currentRevision"] not in (old, bad)


def test_on_failure_pause_keeps_the_replicas_without_traffic() -> None:
    serving = CanaryServing(canary={"onFailure": "Pause"})
    old, new = begun(serving)
    serving.quality[new] = Quality(error_percent=50)
    rounds(serving, 40)
    assert serving.shares == {new: 0, old: 100}
    assert len(serving.engines(new)) == 1


def in_use(serving: CanaryServing, revision: str) -> int:
    """Ready replicas of a revision that are not draining."""
    backends = serving.snapshot()["backends"]
    return sum(found["revision"] == revision and not found["draining"] for found in backends)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@example(replicas=2, limits=(0, 1), percent=10, quality=Quality(error_percent=50), on_failure="Pause")
@given(
    replicas=st.integers(1, 9),
    limits=st.sampled_from([(1, 0), (0, 1), ("25%", "25%"), (3, 2)]),
    percent=st.sampled_from([10, 50, 100]),
    quality=st.sampled_from([Quality(error_percent=50), Quality(first_token_s=0.5)]),
    on_failure=st.sampled_from(["RollBack", "Pause"]),
)
def test_a_roll_back_from_any_share_takes_the_same_few_passes_whatever_the_replicas(
    replicas: int, limits: tuple[Any, Any], percent: int, quality: Quality, on_failure: str
) -> None:
    gates = [{"metric": "errorRate", "max": "0.02"}, {"metric": "ttftP95Ms", "max": "200"}]
    serving = CanaryServing(replicas=replicas, canary={"metricGates": gates, "onFailure": on_failure})
    surge, unavailable = limits
    pool = {"name": "main", "replicas": replicas, "maxSurge": surge, "maxUnavailable": unavailable}
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=[pool]))
    old, bad = begun(serving, percent)
    serving.quality[bad] = quality
    while serving.canary["phase"] != "Failed":
        serving.round()
    kept = serving.canary["percent"]
    assert kept == 0 or not quality.error_percent
    for _ in range(12):
        serving.round()
        share = serving.canary["percent"]
        assert share <= kept
        assert share == 0 or (100 - share) * replicas <= 200 * in_use(serving, old)
        assert share == 0 or 2 * (in_use(serving, old) + in_use(serving, bad)) >= replicas
        kept = share
    in_its_place = on_failure == "Pause" and surge == 0 and replicas > 1
    assert (kept, in_use(serving, old)) == (0, replicas - in_its_place)
    assert len(serving.engines(bad)) == (on_failure == "Pause")
    assert serving.cluster.objects[POOL]["spec"]["maxUnavailable"] == unavailable
    assert serving.cluster.plan(CHAT).empty
    assert serving.cluster.plan(POOL).empty


def test_a_slow_revision_keeps_what_the_old_one_cannot_take_and_an_abort_takes_that_away() -> None:
    serving = CanaryServing(replicas=8, canary={"metricGates": [{"metric": "ttftP95Ms", "max": "200"}]})
    old, slow = begun(serving, 100)
    serving.quality[slow] = Quality(first_token_s=0.5)
    while serving.canary["phase"] != "Failed":
        serving.round()
    assert (in_use(serving, old), serving.shares) == (1, {slow: 75, old: 25})
    assert f"{old} serves; {slow} keeps 75 % until more replicas of {old} are ready" in serving.status["message"]
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(abort=slow))
    serving.cluster.settle_once()
    assert serving.shares == {slow: 0, old: 100}


def newer(serving: CanaryServing) -> None:
    serving.checkpoint(30)


def back(serving: CanaryServing) -> None:
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(model={"checkpointRef": {"name": "run-10"}}))


def rolling(serving: CanaryServing) -> None:
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(type="rolling", canary=None))


def slow(serving: CanaryServing) -> None:
    serving.quality[target_of(serving)] = Quality(first_token_s=0.5)
    while serving.canary["phase"] == "Holding":
        serving.round()


def promoted(serving: CanaryServing) -> None:
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(promote=target_of(serving)))
    serving.round()


ENDS: dict[str, list[Callable[[CanaryServing], None]]] = {
    "newer revision": [newer],
    "back to the old one": [back],
    "no canary any more": [rolling],
    "no canary any more and a newer revision": [rolling, newer],
    "no canary any more and back": [rolling, back],
    "slow": [slow],
    "slow and a newer revision": [slow, newer],
    "slow and back": [slow, back],
    "promoted and a newer revision": [promoted, newer],
    "promoted and back": [promoted, back],
}


def parts(serving: CanaryServing, revision: str) -> tuple[float, float]:
    """Percent of the traffic that a revision gets, and of the pool's replicas that serve it."""
    ready, replicas = in_use(serving, revision), int(serving.cluster.objects[POOL]["spec"]["replicas"])
    whole = sum(in_use(serving, found["name"]) for found in serving.status["revisions"])
    percent = serving.shares.get(revision, 0) if serving.shares else 100 * ready / max(whole, 1)
    return percent, 100 * ready / replicas


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@example(end="newer revision", replicas=8, limits=(1, 0), percent=100)
@example(end="back to the old one", replicas=8, limits=("25%", "25%"), percent=10)
@example(end="promoted and a newer revision", replicas=8, limits=(1, 0), percent=100)
@example(end="slow and back", replicas=8, limits=(0, 1), percent=100)
@given(
    end=st.sampled_from(sorted(ENDS)),
    replicas=st.integers(1, 9),
    limits=st.sampled_from([(1, 0), (0, 1), ("25%", "25%"), (3, 2)]),
    percent=st.sampled_from([10, 50, 100]),
)
def test_however_a_canary_ends_its_traffic_goes_back_no_faster_than_old_replicas_are_there(
    end: str, replicas: int, limits: tuple[Any, Any], percent: int
) -> None:
    serving = CanaryServing(replicas=replicas, canary={"metricGates": [{"metric": "ttftP95Ms", "max": "200"}]})
    pool = {"name": "main", "replicas": replicas, "maxSurge": limits[0], "maxUnavailable": limits[1]}
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=[pool]))
    old, left = begun(serving, percent)
    for act in ENDS[end]:
        act(serving)
    least = min(replicas - resolve(limits[1], replicas, up=False), math.ceil(replicas / 2))
    kept, goes_on = float(max(percent, serving.canary["percent"])), end == "no canary any more"
    for _ in range(14):
        serving.round()
        carried, there = parts(serving, old)
        assert carried <= 2 * there or serving.status["currentRevision"] != old
        assert goes_on or parts(serving, left)[0] <= kept, "it gets no more than it had"
        kept = parts(serving, left)[0]
        assert sum(in_use(serving, found["name"]) for found in serving.status["revisions"]) >= least
    rounds(serving, 80)
    wanted = left if goes_on else old if end.endswith(("back", "old one", "slow")) else target_of(serving)
    assert (serving.status["currentRevision"], in_use(serving, wanted)) == (wanted, replicas)
    assert (left in (wanted, target_of(serving))) or serving.engines(left) == []
    assert serving.rollout["phase"] == ("RolledBack" if end == "slow" else "Completed")
    assert serving.cluster.plan(CHAT).empty
    assert serving.cluster.plan(POOL).empty


def test_replicas_of_an_interrupted_canary_go_at_once() -> None:
    serving = CanaryServing(replicas=8)
    old, interrupted = begun(serving, 100)
    serving.checkpoint(30)
    serving.round()
    assert serving.shares == {interrupted: 75, old: 25}, "one replica of the old revision takes twice its part"
    text = f"revision {interrupted} is given up: Interrupted: revision r"
    assert serving.status["message"].startswith(text)
    assert serving.status["message"].endswith(f"{interrupted} keeps 75 % until more replicas of {old} are ready")
    assert (serving.status["phase"], serving.condition("Stalled")) == ("Updating", "absent")
    rounds(serving, 8)
    assert (in_use(serving, old), serving.engines(interrupted)) == (7, []), "one of 8 is the new canary's"
    assert serving.cluster.objects[POOL]["spec"]["maxUnavailable"] == 0
    assert serving.cluster.events.count("CanaryInterrupted") == 1


def test_the_way_back_keeps_the_engines_of_a_pool_that_was_made_again_without_the_old_revision() -> None:
    serving = CanaryServing()
    serving.checkpoint(10)
    rounds(serving, 10)
    old = serving.status["currentRevision"]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"threads": 2}))
    while serving.canary.get("percent") != 10:
        serving.round()
    serving.cluster.delete(POOL)
    rounds(serving, 10)
    left = target_of(serving)
    assert (serving.engines(old), in_use(serving, left)) == ([], 4), "its template is lost, so the new one has all"
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={}))
    for _ in range(40):
        serving.round()
        assert in_use(serving, left) + in_use(serving, old) >= 2
    assert (serving.status["currentRevision"], in_use(serving, old), serving.engines(left)) == (old, 4, [])
    assert serving.cluster.plan(CHAT).empty


@pytest.mark.parametrize("ends", ["another edit", "a slow queue"])
def test_engines_that_serve_alone_stay_when_their_canary_ends_and_the_old_revision_is_lost(ends: str) -> None:
    serving = CanaryServing()
    serving.checkpoint(10)
    rounds(serving, 10)
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"threads": 2}))
    while serving.canary.get("percent") != 10:
        serving.round()
    serving.cluster.delete(POOL)
    rounds(serving, 10)
    left = target_of(serving)
    serving.quality[left] = Quality(queue_s=1.0 if ends == "a slow queue" else 0.01)
    if ends == "another edit":
        serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"threads": 3}))
    for _ in range(40):
        serving.round()
        assert sum(in_use(serving, found["name"]) for found in serving.status["revisions"]) >= 4
    assert serving.rollout["phase"] == ("RolledBack" if ends == "a slow queue" else "Completed")
    assert serving.canary.get("percent") == (50 if ends == "a slow queue" else None)
    assert (in_use(serving, target_of(serving)), target_of(serving) == left) == (4, ends == "a slow queue")
    assert serving.cluster.plan(CHAT).empty


@pytest.mark.parametrize("newer", [False, True], ids=["same revision", "newer revision"])
def test_a_canary_that_is_asked_for_while_the_last_old_replicas_drain_takes_no_traffic_away(*, newer: bool) -> None:
    serving = CanaryServing(replicas=2)
    canary = serving.cluster.objects[CHAT]["spec"]["rollout"]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout={"type": "rolling"}))
    old = serving.started()
    new = ""
    while not new or in_use(serving, old) or in_use(serving, new) < 2:
        serving.cluster.settle_once()
        new = target_of(serving)
        for pod in serving.engines(new):
            serving.cluster.run(pod)
        serving.take_snapshots()
    assert serving.status["currentRevision"] == old, "its streams go on"
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout=canary))
    if newer:
        serving.checkpoint(30)
    for _ in range(40):
        serving.round()
        shares = serving.shares or dict.fromkeys((old, new, target_of(serving)), 1)
        assert sum(in_use(serving, name) for name, percent in shares.items() if percent) >= 2
    assert (serving.rollout["phase"], serving.status["currentRevision"]) == ("Completed", target_of(serving))
    assert serving.status["currentCheckpoint"]["step"] == (30 if newer else 20)
    serving.checkpoint(40)
    rounds(serving, 10)
    assert serving.canary["phase"] in ("Waiting", "Holding"), "the next revision has its canary"


def test_a_version_with_other_hashes_goes_on_with_the_way_back_to_the_old_revision() -> None:
    serving = CanaryServing(replicas=8)
    serving.checkpoint(10)
    rounds(serving, 10)
    old = serving.status["currentRevision"]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"threads": 2}))
    while serving.canary.get("percent") != 100:
        serving.round()
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={}))
    serving.round()
    assert serving.canary["reason"] == "Interrupted"
    older = renamed_as_by_an_older_version(serving)
    rounds(serving, 40)
    assert (serving.status["currentRevision"], in_use(serving, older[old])) == (older[old], 8)
    assert {found["name"] for found in serving.status["revisions"]} == set(older.values())
    assert serving.cluster.plan(CHAT).empty


def test_a_canary_that_is_wanted_again_begins_anew_when_its_traffic_is_back() -> None:
    serving = CanaryServing(replicas=8)
    old, left = begun(serving, 100)
    back(serving)
    serving.round()
    selector = {"checkpointSelector": {"jobRef": {"name": "run"}}}
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(model=selector))
    seen = []
    for _ in range(150):
        serving.round()
        seen.append(serving.canary.get("percent", 0))
    assert list(dict.fromkeys(seen)) == [75, 0, 10, 50, 100]
    assert (serving.status["currentRevision"], serving.engines(old)) == (left, [])


def test_an_interrupted_canary_that_is_aborted_gives_its_traffic_back_at_once() -> None:
    serving = CanaryServing(replicas=8)
    old, left = begun(serving, 100)
    newer(serving)
    serving.round()
    assert serving.shares == {left: 75, old: 25}
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(abort=left))
    serving.round()
    assert serving.shares.get(left, 0) == 0


@pytest.mark.parametrize("what", ["rate", "reports"])
def test_without_answers_or_reports_the_share_stays(what: str) -> None:
    serving = CanaryServing(rate=50)
    _, new = begun(serving)
    if what == "rate":
        serving.rate = 0
    else:
        serving.take_snapshots = lambda **_: serving.cluster.reports.clear()  # type: ignore[method-assign]
    before = serving.answered[new]
    rounds(serving, 100)
    assert serving.canary["percent"] == 10
    assert serving.answered[new] == before or what == "rate"
    assert serving.canary["reason"] in ("TooFewRequests", "MissingData")


def test_a_pause_keeps_the_share_and_a_gate_still_fails() -> None:
    serving = CanaryServing()
    old, new = begun(serving)
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(paused=True))
    rounds(serving, 60)
    assert serving.canary["percent"] == 10
    assert serving.canary["reason"] == "Paused"
    serving.quality[new] = Quality(error_percent=90)
    rounds(serving, 30)
    assert serving.shares == {new: 0, old: 100}


def test_people_abort_and_promote_by_the_name_of_the_revision() -> None:
    serving = CanaryServing()
    old, new = begun(serving)
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(abort="r0123456789"))
    rounds(serving, 3)
    assert serving.rollout["phase"] == "Progressing", "the name of another revision does nothing"
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(abort=new))
    rounds(serving, 30)
    assert (serving.rollout["phase"], serving.canary["reason"]) == ("RolledBack", "AbortedByHand")
    assert serving.engines(new) == []
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(promote=new))
    rounds(serving, 40)
    assert (serving.status["currentRevision"], serving.rollout["phase"]) == (new, "Completed")
    assert serving.engines(old) == []


def test_a_name_that_is_no_revision_is_told_and_changes_nothing() -> None:
    serving = CanaryServing()
    _, new = begun(serving)
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(promote="rtypo", abort="rtypo"))
    rounds(serving, 12)
    for field in ("promote", "abort"):
        text = f"spec.rollout.{field} rtypo is no revision of this deployment; the canary is {new}"
        assert text in serving.canary["message"]
        assert text in serving.status["message"]
    assert serving.canary["phase"] in ("Waiting", "Holding")


def test_replicas_that_never_get_ready_end_the_canary_at_the_deadline() -> None:
    serving = CanaryServing(progressDeadlineSeconds=60)
    old, seen = serving.started(), set[str]()
    for _ in range(60):
        serving.cluster.settle_once()
        seen.add(str(serving.status.get("message")))
        for pod in serving.cluster.pods("router"):
            serving.cluster.run(pod)
        serving.take_snapshots()
        serving.drain_engines()
        serving.cluster.collect()
        serving.cluster.advance(2)
    assert serving.canary["reason"] == "NotReady"
    assert serving.shares[old] == 100
    assert any(line.startswith("step 1 of 3 (10 %) waits for its replicas: ") for line in seen), seen


@pytest.mark.parametrize("failed", [False, True], ids=["holding", "failed"])
def test_a_deployment_that_becomes_rolling_has_no_canary_and_no_shares_any_more(*, failed: bool) -> None:
    serving = CanaryServing()
    _, new = begun(serving)
    serving.quality[new] = Quality(error_percent=50 if failed else 0)
    rounds(serving, 10 if failed else 0)
    assert serving.canary["phase"] == ("Failed" if failed else "Holding")
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(type="rolling", canary=None))
    rounds(serving, 1)
    assert (serving.canary, serving.shares) == ({}, {}), "its share holds no more"
    rounds(serving, 60)
    assert (serving.status["currentRevision"], serving.status["phase"]) == (new, "Serving")
    assert (serving.rollout["phase"], serving.canary, serving.shares) == ("Completed", {}, {})
    assert serving.cluster.plan(CHAT).empty


def test_what_a_deployment_lacks_after_a_roll_back_is_no_update() -> None:
    serving = CanaryServing()
    rolled_back(serving)
    for router in serving.cluster.pods("router"):
        serving.cluster.kill(router)
    serving.cluster.settle_once()
    assert serving.status["phase"] == "Degraded"
    assert serving.status["message"].startswith("no router is ready")
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=0))
    rounds(serving, 20)
    assert serving.status["phase"] == "ScaledToZero"
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=2))
    rounds(serving, 20)
    assert (serving.status["phase"], condition_of(serving.status, "Stalled")["status"]) == ("Serving", "True")


def test_an_engine_pool_that_is_deleted_after_a_roll_back_is_made_again_of_the_old_checkpoint() -> None:
    serving = CanaryServing()
    old, _ = rolled_back(serving)
    serving.cluster.delete(POOL)
    rounds(serving, 30)
    assert (len(serving.engines(old)), serving.status["phase"]) == (4, "Serving")
    assert serving.status["currentCheckpoint"]["step"] == 10
    assert serving.cluster.plan(CHAT).empty


def test_a_revision_that_was_lost_with_its_engine_pool_is_named_and_the_other_one_can_be_promoted() -> None:
    serving = CanaryServing()
    old = serving.started()
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"threads": 2}))
    serving.round()
    bad = target_of(serving)
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(abort=bad))
    rounds(serving, 20)
    assert serving.rollout["phase"] == "RolledBack"
    serving.cluster.delete(POOL)
    rounds(serving, 30)
    assert (serving.status["phase"], condition_of(serving.status, "Stalled")["status"]) == ("Failed", "True")
    text = (
        f"EnginePool chat-main was deleted, and with it revision {old}, which neither spec nor a Checkpoint describes"
    )
    assert serving.status["message"].startswith(text)
    assert serving.cluster.plan(CHAT).empty
    serving.cluster.change_spec(CHAT, lambda spec: spec["rollout"].update(promote=bad))
    rounds(serving, 30)
    assert (serving.status["currentRevision"], serving.status["phase"]) == (bad, "Serving")


def test_going_back_to_the_old_intent_ends_the_canary() -> None:
    serving = CanaryServing()
    old, new = begun(serving)
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(model={"checkpointRef": {"name": "run-10"}}))
    rounds(serving, 40)
    assert (serving.status["currentRevision"], serving.rollout["phase"]) == (old, "Completed")
    assert serving.engines(new) == []


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=EVENTS)
def test_any_order_and_any_crash_end_in_a_replaced_revision(events: list[tuple[str, int]]) -> None:
    serving = CanaryServing(replicas=2, canary={"steps": [{"percent": 50, "holdSeconds": 4}], "metricGates": []})
    serving.started()
    for event, number in events:
        before = serving.canary.get("percent", 0)
        disturb(serving, event, number)
        after = serving.canary.get("percent", 0)
        assert after <= before or event in ("deployment", "scale"), "a share rises by a pass alone"
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=2))
    for _ in range(200):
        serving.round()
        over = serving.rollout["phase"] in ("Completed", "RolledBack")
        if over and serving.cluster.plan(CHAT).empty and serving.cluster.plan(POOL).empty:
            break
    wanted = max(c["status"]["step"] for c in serving.cluster.of_kind("Checkpoint"))
    assert serving.rollout["phase"] in ("Completed", "RolledBack")
    assert serving.rollout["phase"] == "RolledBack" or serving.status["currentCheckpoint"]["step"] == wanted
    assert len(serving.engines(serving.status["currentRevision"])) == 2
    assert serving.cluster.plan(CHAT).empty
    assert serving.cluster.plan(POOL).empty


EVALS = [{"name": "known", "prompts": {"name": "questions", "key": "q.jsonl"}, "minScore": "0.9", "maxDrop": "0.05"}]


def in_two_pools(serving: CanaryServing) -> str:
    """Ask for another layout; return the revision that serves."""
    serving.checkpoint(10)
    rounds(serving, 10)
    pools = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=pools))
    rounds(serving, 2)
    return str(serving.status["currentRevision"])


def pools_of(serving: CanaryServing) -> list[str]:
    return sorted(str(pool["metadata"]["name"]) for pool in serving.cluster.of_kind("EnginePool"))


def test_another_layout_of_pools_gets_every_share_beside_the_former_pools() -> None:
    serving = CanaryServing(replicas=2)
    old = in_two_pools(serving)
    first = target_of(serving)
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"threads": 2}))
    seen: list[int] = []
    for _ in range(120):
        serving.round()
        seen.append(serving.canary.get("percent", 0))
        if serving.canary.get("phase") in ("Waiting", "Holding"):
            assert (len(serving.engines(old)), serving.status["pools"][2]["name"]) == (2, "main")
    assert list(dict.fromkeys(seen)) == [0, 10, 50, 100]
    assert serving.status["currentRevision"] == target_of(serving) not in (old, first)
    assert (serving.rollout["phase"], serving.status["ready"]) == ("Completed", "2/2")
    assert pools_of(serving) == ["chat-d", "chat-p"]
    assert serving.cluster.plan(CHAT).empty


def test_another_layout_that_fails_leaves_the_former_pools_alone() -> None:
    serving = CanaryServing(replicas=2)
    old = in_two_pools(serving)
    serving.quality[target_of(serving)] = Quality(error_percent=50)
    rounds(serving, 30)
    assert (serving.rollout["phase"], serving.status["phase"]) == ("RolledBack", "Serving")
    assert (serving.status["currentRevision"], len(serving.engines(old))) == (old, 2)
    assert (pools_of(serving), serving.engines(target_of(serving))) == (["chat-main"], [])
    assert serving.status["ready"] == "2/2", "pools that were given up count no replicas"
    assert serving.cluster.plan(CHAT).empty


@pytest.mark.parametrize("fails", [False, True], ids=["good", "rolled back"])
def test_a_pool_that_is_removed_during_a_canary_serves_with_all_its_replicas_during_the_next(fails: bool) -> None:
    """The revision of the interrupted canary gets no traffic any more, so its replicas would idle."""
    serving, left = CanaryServing(), Key("EnginePool", "default", "chat-left")
    pools = [{"name": "main", "replicas": 2}, {"name": "left", "replicas": 4}]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=pools))
    old, interrupted = begun(serving, 50)
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=pools[:1]))
    rounds(serving, 15)
    serving.quality[target_of(serving)] = Quality(error_percent=50 if fails else 0)
    assert target_of(serving) not in (old, interrupted)
    assert serving.engines(interrupted) == []
    counts = {found["name"]: found["ready"] for found in serving.cluster.objects[left]["status"]["revisions"]}
    assert counts[old] == 4
    rounds(serving, 120)
    assert serving.rollout["phase"] == ("RolledBack" if fails else "Completed")
    assert (left in serving.cluster.objects, serving.engines(interrupted)) == (fails, [])
    assert serving.cluster.plan(CHAT).empty


def test_a_pool_that_is_removed_while_its_canary_is_paused_keeps_both_revisions() -> None:
    serving, left = CanaryServing(), Key("EnginePool", "default", "chat-left")
    pools = [{"name": "main", "replicas": 2}, {"name": "left", "replicas": 4}]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=pools))
    old, new = begun(serving, 50)
    paused = {**serving.cluster.objects[CHAT]["spec"]["rollout"], "paused": True}
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(rollout=paused, pools=pools[:1]))
    rounds(serving, 15)
    assert serving.shares == {new: 50, old: 50}
    shares = {found["name"]: found["share"] for found in serving.cluster.objects[left]["spec"]["revisions"]}
    assert shares == {new: 50, old: 50}


def test_a_canary_waits_for_no_replica_of_a_pool_that_has_none() -> None:
    serving = CanaryServing(replicas=2)
    pools = [{"name": "p", "role": "prefill", "replicas": 2}, {"name": "d", "role": "decode", "replicas": 0}]
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=pools))
    serving.started()
    rounds(serving, 120)
    assert (serving.rollout["phase"], serving.status["ready"]) == ("Completed", "2/2")


def tasks(serving: CanaryServing) -> list[Any]:
    return [pod for pod in serving.cluster.pods("task") if pod["status"]["phase"] == "Pending"]


def evaluating() -> tuple[CanaryServing, str]:
    serving = CanaryServing(canary={"evalGates": EVALS})
    old = serving.started()
    for _ in range(100):
        serving.round()
        if tasks(serving):
            return serving, old
    raise AssertionError(serving.status)


@pytest.mark.parametrize(
    ("result", "passed"),
    [
        pytest.param({"questions": 20, "score": 0.95, "base_score": 0.97, "differs": 3}, True, id="good"),
        pytest.param({"questions": 20, "score": 0.85, "base_score": 0.8, "differs": 3}, False, id="low score"),
        pytest.param({"questions": 20, "score": 0.91, "base_score": 1.0, "differs": 3}, False, id="drop"),
        pytest.param(
            {"questions": 20, "score": 0.95, "base_score": 0.0, "differs": 20, "base_failed": 20}, False, id="no base"
        ),
        pytest.param({"questions": 20}, False, id="not readable"),
    ],
)
def test_no_request_reaches_a_revision_before_its_eval_gate_has_passed(result: dict[str, Any], passed: bool) -> None:
    serving, old = evaluating()
    (task,) = tasks(serving)
    new = target_of(serving)
    rounds(serving, 20)
    assert (serving.canary["reason"], serving.answered[new], len(tasks(serving))) == ("Evaluating", 0, 1)
    command = " ".join(task["spec"]["containers"][0]["command"])
    assert f"--new http://chat-main-{new}-0." in command
    assert f"--old http://chat-main-{old}-" in command
    serving.cluster.end(task, Cause.COMPLETED, result=result)
    rounds(serving, 3)
    gate = serving.canary["gates"][0]
    assert (gate["metric"], gate["verdict"]) == ("eval:known", "Passed" if passed else "Failed")
    assert serving.canary["percent"] == (10 if passed else 0)
    rounds(serving, 90)
    assert (serving.rollout["phase"] == "Completed") is passed
    assert serving.cluster.pods("task") == [], "tasks that nothing needs are removed"
    if passed:
        assert serving.answered[new] > 0
    else:
        assert (serving.answered[new], serving.status["currentRevision"]) == (0, old)


def test_each_revision_is_asked_by_its_own_name_of_the_model() -> None:
    serving = CanaryServing(canary={"evalGates": EVALS})
    serving.checkpoint(10)
    rounds(serving, 20)
    serving.cluster.change_spec(CHAT, lambda spec: spec["model"].update(names=["talk"]))
    rounds(serving, 20)
    (task,) = tasks(serving)
    assert "--model talk --old-model chat " in " ".join(task["spec"]["containers"][0]["command"])


@pytest.mark.parametrize(
    ("before", "after", "files"),
    [
        ("a", "a", {"--api-keys": "a"}),
        ("a", "b", {"--api-keys": "b", "--old-api-keys": "a"}),
        (None, "b", {"--api-keys": "b"}),
        ("a", None, {"--old-api-keys": "a"}),
        (None, None, {}),
    ],
)
def test_each_revision_is_asked_with_its_own_api_keys(
    before: str | None, after: str | None, files: dict[str, str]
) -> None:
    def api(secret: str | None) -> dict[str, Any]:
        return {"apiKeySecretRef": {"name": secret, "key": "k"}} if secret else {}

    serving = CanaryServing(canary={"evalGates": EVALS})
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(engine={"api": api(before)}))
    serving.started()
    serving.cluster.change_spec(
        CHAT, lambda spec: spec.update(engine={"api": {**api(after), "maxBodyBytes": 1_000_000}})
    )
    rounds(serving, 20)
    (task,) = tasks(serving)
    (container,), command = task["spec"]["containers"], task["spec"]["containers"][0]["command"]
    secrets = {found["name"]: found["secret"]["secretName"] for found in task["spec"]["volumes"] if "secret" in found}
    mounted = {f"{found['mountPath']}/keys": secrets.get(found["name"]) for found in container["volumeMounts"]}
    options = {name: mounted[value] for name, value in itertools.pairwise(command) if name.endswith("api-keys")}
    assert options == files


def test_an_eval_task_that_dies_is_tried_again_and_in_the_end_the_canary_fails() -> None:
    serving, _ = evaluating()
    for _ in range(3):
        (task,) = tasks(serving)
        serving.cluster.end(task, Cause.TASK_FAILED, detail="no such key")
        rounds(serving, 3)
    assert serving.canary["reason"] == "GateFailed"
    assert "its task failed 3 times" in serving.status["message"]
    assert serving.shares[target_of(serving)] == 0


def test_the_example_runs_to_its_end() -> None:
    text = (Path(__file__).parents[2] / "examples/serve-canary/serve.yaml").read_text(encoding="utf-8")
    example = yaml.safe_load(text)["spec"]
    serving = CanaryServing(replicas=example["pools"][0]["replicas"], rate=2000, canary=example["rollout"]["canary"])
    old = serving.started()
    seen: list[int] = []
    for _ in range(150):
        serving.round()
        serving.cluster.advance(28)
        for task in tasks(serving):
            result = {"questions": 100, "score": 0.97, "base_score": 0.97, "differs": 0}
            serving.cluster.end(task, Cause.COMPLETED, result=result)
        seen.append(serving.canary.get("percent", 0))
        if serving.rollout["phase"] == "Completed" and serving.status["currentRevision"] != old:
            break
    assert list(dict.fromkeys(seen)) == [0, 5, 25, 50, 100]
    assert serving.status["currentCheckpoint"]["step"] == 20


def test_a_canary_whose_deployment_is_scaled_to_zero_says_so_and_goes_on_afterwards() -> None:
    serving = CanaryServing(replicas=2)
    begun(serving)
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=0))
    rounds(serving, 30)
    assert (serving.status["phase"], serving.status["ready"]) == ("ScaledToZero", "0/0")
    assert serving.status["message"].startswith("scaled to zero: no replicas in pool main; canary: step 2 of 3 (50 %)")
    assert condition_of(serving.status, "Ready")["reason"] == "ScaledToZero"
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=2))
    rounds(serving, 30)
    assert (serving.status["phase"], serving.canary["phase"]) == ("Serving", "Promoted")


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    percent=st.sampled_from([10, 50, 100]),
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=3),
    limits=st.sampled_from([(1, 0), (0, 1), ("25%", "25%"), (3, 2)]),
    errors=st.booleans(),
)
def test_an_edit_of_the_replicas_during_a_step_changes_neither_the_share_nor_the_end(
    percent: int, sizes: list[tuple[int, int]], limits: tuple[Any, Any], errors: bool
) -> None:
    serving = CanaryServing(replicas=4)
    pool = {"name": "main", "replicas": 4, "maxSurge": limits[0], "maxUnavailable": limits[1]}
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=[pool]))
    old, new = begun(serving, percent)
    serving.quality[new] = Quality(error_percent=50 if errors else 0)
    for replicas, number in sizes:
        pool["replicas"], before = replicas, serving.canary
        serving.cluster.change_spec(CHAT, lambda spec: spec.update(pools=[dict(pool)]))
        serving.cluster.settle_once()
        assert target_of(serving) == new, "a number of replicas makes no revision"
        assert serving.canary.get("percent", 0) <= max(before["percent"], percent) or before["phase"] != "Holding"
        rounds(serving, number)
    serving.cluster.change_spec(CHAT, lambda spec: spec["pools"][0].update(replicas=3))
    rounds(serving, 150)
    assert serving.rollout["phase"] == ("RolledBack" if errors else "Completed")
    assert (in_use(serving, old if errors else new), len(serving.engines())) == (3, 3)
    assert serving.cluster.plan(CHAT).empty
    assert serving.cluster.plan(POOL).empty


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "engine": lambda spec: spec.update(engine={"threads": 2}),
    "engine again": lambda spec: spec.update(engine={"threads": 4}),
    "replicas": lambda spec: spec["pools"][0].update(replicas=3),
    "layout": lambda spec: spec.update(pools=[{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]),
    "back": lambda spec: spec.update(pools=[{"name": "main", "replicas": 4}], engine={}),
    "rolling": lambda spec: spec.update(rollout={"type": "rolling"}),
    "model": lambda spec: spec.update(model={"checkpointRef": {"name": "run-10"}}),
    "no model": lambda spec: spec.update(model={"checkpointRef": {"name": "run-99"}}),
    "paused": lambda spec: spec["rollout"].update(paused=True),
    "refused": lambda spec: spec["pools"][0].update(gpusPerPod=1, parallelism={"tensor": 8}),
}


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    percent=st.sampled_from([10, 100]),
    edits=st.lists(st.tuples(st.sampled_from(sorted(EDITS)), st.sampled_from([0, 0, 1, 3, 9])), max_size=5),
)
def test_any_edits_between_two_passes_end_where_the_last_spec_leads(percent: int, edits: list[tuple[str, int]]) -> None:
    serving = CanaryServing(replicas=4, canary={"metricGates": []})
    begun(serving, percent)
    for name, number in edits:
        serving.cluster.change_spec(CHAT, EDITS[name])
        for _ in range(number):
            serving.round()
            usable = [found for found in serving.snapshot()["backends"] if not found["draining"]]
            assert usable
    last = {
        "pools": [{"name": "main", "replicas": 4}], "engine": {"threads": 8}, "rollout": {"type": "rolling"},
        "model": {"checkpointRef": {"name": "run-20"}},
    }  # fmt: skip
    serving.cluster.change_spec(CHAT, lambda spec: spec.update(last))
    for _ in range(80):
        serving.round()
        usable = [found for found in serving.snapshot()["backends"] if not found["draining"]]
        assert usable
    assert (serving.status["phase"], serving.rollout["phase"]) == ("Serving", "Completed")
    assert serving.status["currentCheckpoint"]["step"] == 20
    assert len(serving.engines()) == 4
    assert pools_of(serving) == ["chat-main"]
    assert serving.cluster.plan(CHAT).empty
    assert serving.cluster.plan(POOL).empty
