"""Stragglers in the status of a job: with pod and node, a condition, an Event; gone when the trainer says so."""

from __future__ import annotations

from typing import Any

from prometheus_client import generate_latest

from stoker.operator.domain.plan import Key
from stoker.operator.loop.metrics import OperatorMetrics, OperatorState
from stoker.operator.loop.node_watch import NodeCounts
from testing.operator.training_world import JOB, Run


def report(run: Run, *late: tuple[int, int, float]) -> None:
    """The leader's report; `late`: rank, node rank and seconds of each straggler, whose peers take 0.5 s."""
    found = [{"rank": rank, "node_rank": node, "busy_s": busy, "typical_s": 0.5} for rank, node, busy in late]
    body: dict[str, Any] = {"attempt": run.attempt, "phase": "Training", "step": 9, "total_steps": 100, "saves": []}
    run.cluster.report(run.gang[0], {**body, "stragglers": found})
    run.cluster.settle()


def condition(run: Run) -> str | None:
    return next((found["message"] for found in run.status["conditions"] if found["type"] == "Straggling"), None)


def test_a_straggler_is_named_with_its_pod_and_node_until_it_is_none() -> None:
    run = Run(workers={"replicas": 2, "ranksPerPod": 2})
    run.start()
    run.gang[1]["spec"]["nodeName"] = "n1"
    report(run)
    assert (condition(run), run.status["stragglers"]) == (None, [])
    report(run, (3, 1, 0.9))
    name = run.gang[1]["metadata"]["name"]
    assert run.status["stragglers"] == [{"rank": 3, "pod": name, "node": "n1", "ratio": "1.8"}]
    assert condition(run) == "rank 3 on node n1 computes 1.8 times as long as its peers"
    assert run.cluster.events.count("StragglerFound") == 1
    assert run.status["phase"] == "Running", "nothing is restarted for it"
    assert run.cluster.plan(JOB).empty
    report(run, (1, 0, 1.0), (3, 1, 0.9))
    assert run.cluster.events.count("StragglerFound") == 2
    report(run)
    assert (condition(run), run.status["stragglers"]) == (None, [])


def test_a_run_that_is_over_has_no_straggler() -> None:
    run = Run()
    run.start()
    report(run, (1, 1, 0.9))
    assert condition(run)
    for pod in run.gang:
        run.cluster.kill(pod)
    run.cluster.settle()
    assert (condition(run), run.status["stragglers"]) == (None, [])


def test_the_metrics_show_starts_and_stragglers_by_job() -> None:
    metrics, key = OperatorMetrics(), Key("TrainingJob", "team", "run")
    state = OperatorState(
        queue=0,
        delayed=0,
        polls=0,
        objects={},
        silence_s={},
        nodes=NodeCounts(silent=0, in_outage=0, outages=0),
        starts={key: {"pull": 26, "firstStep": 4}},
        engine_starts={Key("EnginePool", "team", "chat-main"): {"load": 5}},
        stragglers={key: 2},
    )
    metrics.watch(lambda: state)
    text = generate_latest(metrics.registry).decode()
    assert 'stoker_operator_trainingjob_startup_seconds{name="run",namespace="team",part="pull"} 26.0' in text
    assert 'stoker_operator_enginepool_startup_seconds{name="chat-main",namespace="team",part="load"} 5.0' in text
    assert 'stoker_operator_trainingjob_stragglers{name="run",namespace="team"} 2.0' in text
