"""A zone without a word of its nodes: its gang waits, then moves, and what still writes there changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.checkpoint.errors import CheckpointExists
from stoker.checkpoint.store import CheckpointRoot
from stoker.operator.domain.lost_nodes import Carrier, NodeLimits, NodeSilence, classify, note_silence
from stoker.operator.domain.placement.node_capacity import pinned_node
from stoker.operator.domain.plan import Key, Object
from stoker.operator.domain.settings import Settings
from stoker.pod.writer import writer_of
from testing.checkpoint.synthetic import make_state, save
from testing.operator.training_world import JOB, Run

GPU = "nvidia.com/gpu"
ZONE = "topology.kubernetes.io/zone"
LIMITS = NodeLimits(lost_s=30, outage_share=0.5, outage_nodes=3, zone_outage_s=900)
ZONES = {"x": ("x0", "x1", "x2"), "y": ("y0", "y1", "y2", "y3")}


class Zones:
    """A run of three pods, one on each node of zone x, and the silence of nodes as the operator counts it."""

    def __init__(self) -> None:
        self.run = Run(
            Settings(places_gangs=True),
            workers={"replicas": 3, "gpusPerPod": 1},
            training={"totalSteps": 1000, "globalBatchSize": 6},
            scheduling={"topology": [{"key": ZONE}, {"key": ZONE}, {"key": ZONE, "mode": "Required"}]},
        )
        for zone, names in ZONES.items():
            for name in names:
                self.run.cluster.add(node(name, zone))
        self.silent: frozenset[str] = frozenset()
        self._known, self._now_s = NodeSilence(), 0.0

    def pass_time(self, seconds: float, silent: str = "") -> None:
        """Let time pass; the nodes of the zone `silent` sent no heartbeat since then."""
        names = frozenset(ZONES.get(silent, ()))
        for name in names ^ self.silent:
            ready = self.run.cluster.objects[Key("Node", "", name)]["status"]["conditions"][0]
            ready["status"] = "Unknown" if name in names else "True"
        self.silent = names
        carriers = {name: Carrier(name in names, zone) for zone, members in ZONES.items() for name in members}
        for _ in range(2):
            self._known = note_silence(self._known, carriers, self._now_s, LIMITS, watched=True)
            self._now_s += seconds / 2
            self.run.cluster.advance(seconds / 2)
        self.run.cluster.losses = classify(self._known, self._now_s, LIMITS)
        self.run.cluster.settle()

    def places(self) -> list[str | None]:
        return sorted((pinned_node(pod) for pod in self.run.gang), key=str)


def node(name: str, zone: str) -> Object:
    status = {
        "allocatable": {GPU: "1", "cpu": "64", "memory": "512Gi", "pods": "110"},
        "conditions": [{"type": "Ready", "status": "True"}],
    }
    metadata = {"name": name, "namespace": "", "labels": {ZONE: zone}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {}, "status": status}


def moved() -> tuple[Zones, Object, dict[str, Any]]:
    """A run that saved step 40 in zone x, whose zone is dead; with its old leader and the leader's last report."""
    zones = Zones()
    zones.run.start()
    assert zones.places() == ["x0", "x1", "x2"]
    zones.run.train(60, (zones.run.save(40),))
    leader = zones.run.gang[0]
    report = dict(zones.run.cluster.reports[leader["metadata"]["uid"]])
    zones.pass_time(600, silent="x")
    assert zones.run.attempt == 0, "an outage: the zone may come back"
    assert [found["status"] for found in zones.run.status["conditions"] if found["type"] == "NodesSilent"] == ["True"]
    zones.pass_time(400, silent="x")
    for _ in range(4):
        zones.run.answer_tasks("list", saves=[zones.run.save(40)])
        zones.run.cluster.collect()
        zones.pass_time(10, silent="x")
    return zones, leader, report


def test_a_gang_moves_out_of_a_zone_that_stays_silent() -> None:
    zones, _, _ = moved()
    run = zones.run
    assert run.attempt == 1
    assert len(zones.places()) == 3
    assert set(zones.places()) < set(ZONES["y"]), "all of it in the other zone"
    assert run.status["attempt"]["resumedFrom"]["step"] == 40
    assert run.status["attempts"][0]["failure"]["detail"].startswith("NodeLost")
    assert run.status.get("failuresWithoutProgress", 0) == 0, "no failure of the run"


def test_a_writer_in_the_dead_zone_cannot_commit_any_more() -> None:
    """Its pods still run and train there, cut off. Their saves have the name of their own attempt."""
    zones, leader, report = moved()
    run = zones.run
    for pod in run.gang:
        run.cluster.run(pod)
    run.train(45)
    stale = f"step-00000500.{writer_of(run.job['metadata']['uid'], 0)}"
    late = {**run.save(500), "folder": stale, "id": stale}
    run.cluster.reports[leader["metadata"]["uid"]] = {**report, "step": 500, "saves": [late]}
    run.cluster.reports[run.gang[0]["metadata"]["uid"]]["saves"] = [late]
    run.cluster.settle()
    assert steps(run) == [40], "neither the old leader's report nor a foreign folder in the new one's counts"
    run.cluster.kill(run.gang[0])
    for _ in range(6):
        run.answer_tasks("list", saves=[late])
        run.cluster.collect()
        zones.pass_time(60, silent="x")
    assert run.attempt > 1
    assert run.status["attempt"]["resumedFrom"]["step"] == 40, "nor one that a later listing finds"
    assert steps(run) == [40]
    assert run.cluster.plan(JOB).empty


def steps(run: Run) -> list[int]:
    return sorted(found["status"]["step"] for found in run.cluster.of_kind("Checkpoint"))


def test_what_a_stale_writer_commits_leaves_the_new_attempts_save_as_it_was(tmp_path: Path) -> None:
    root = CheckpointRoot(tmp_path)
    state = make_state({"weight": ((4, 4), "float32")})
    old, new = (writer_of("uid", attempt) for attempt in (0, 1))
    resumed = save(root, state, step=60, writer=new)
    folder = tmp_path / resumed.folder_name
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    stale = save(root, make_state({"weight": ((4, 4), "float32")}, seed=9), step=60, writer=old)
    assert stale.folder_name != resumed.folder_name
    assert root.find(resumed.folder_name, resumed.digest).digest == resumed.digest
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(CheckpointExists):
        save(root, state, step=60, writer=new)
