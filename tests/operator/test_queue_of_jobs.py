"""The queue as the operator runs it: who waits is read from jobs and pods, and every pass gets its job's turn."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.operator.domain.placement.node_capacity import pinned_node
from stoker.operator.domain.plan import Key, Object, Observed
from stoker.operator.domain.queue.decide import decide
from stoker.operator.domain.queue.reading import COMES_BACK_S, applicant_of, read_queue
from stoker.operator.domain.settings import Settings
from stoker.operator.loop.capacity_watch import CapacityWatch
from stoker.operator.loop.room_queue import RoomQueue
from stoker.operator.loop.store import Store, key_of
from stoker.operator.loop.waiting_gangs import WaitingGangs
from stoker.pod.causes import Cause
from testing.operator.fakes import FakeClock
from testing.operator.ready_node import ready_node
from testing.operator.simulated_cluster import START
from testing.operator.training_world import JOB, Run


class Jobs(Run):
    """A cluster with nodes and several jobs; `run` is the first of them."""

    def __init__(self, *nodes: Object, replicas: int = 2) -> None:
        training = {"totalSteps": 100, "globalBatchSize": 24}
        super().__init__(
            Settings(places_gangs=True), workers={"replicas": replicas, "gpusPerPod": 4}, training=training
        )
        for node in nodes:
            self.cluster.add(node)

    def submit(self, name: str, replicas: int, namespace: str = "default") -> Key:
        """Add a job like `run`, a minute younger than the one before."""
        self.cluster.add(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": "claim", "namespace": namespace},
                "spec": {},
            }
        )
        spec = copy.deepcopy(self.job["spec"])
        spec["workers"]["replicas"] = replicas
        metadata = {"name": name, "namespace": namespace}
        made = self.cluster.add(
            {"apiVersion": "stoker.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}
        )
        age = len(self.cluster.of_kind("TrainingJob"))
        made["metadata"]["creationTimestamp"] = f"2026-01-01T00:{age:02}:00Z"
        return key_of(made)

    @property
    def gang(self) -> list[Object]:
        return [pod for pod in super().gang if pod["metadata"]["labels"]["stoker.dev/job"] == "run"]

    def places(self, key: Key) -> list[str | None]:
        uid = self.cluster.objects[key]["metadata"]["uid"]
        pods = [pod for pod in self.cluster.pods("trainer") if pod["metadata"]["labels"]["stoker.dev/job-uid"] == uid]
        return [pinned_node(pod) for pod in pods if pod["status"]["phase"] in {"Pending", "Running"}]

    def message(self, key: Key) -> str:
        return str(self.cluster.objects[key]["status"]["message"])

    def set_priority(self, key: Key, value: int) -> None:
        """What the API server writes into pods with a priority class."""
        uid = self.cluster.objects[key]["metadata"]["uid"]
        for pod in self.cluster.pods("trainer"):
            if pod["metadata"]["labels"]["stoker.dev/job-uid"] == uid:
                pod["spec"]["priority"] = value


def test_the_head_waits_for_room_and_those_behind_it_leave_it_the_room() -> None:
    jobs = Jobs(*(ready_node(f"n{index}") for index in range(4)))
    jobs.start()
    big = jobs.submit("big", 4)
    small = jobs.submit("small", 1)
    jobs.cluster.settle()
    assert jobs.message(big) == (
        "Queued 1 of 2: WaitingForGPUs: 2 of 4 pods fit on 4 nodes, nvidia.com/gpu: 8 free, 16 needed"
    )
    assert jobs.message(small) == "Queued 2 of 2: room is kept for default/big"
    assert jobs.places(small) == [None]
    jobs.train(100, (jobs.save(100),))
    for pod in jobs.gang:
        jobs.cluster.end(pod, Cause.COMPLETED, saves=(jobs.word(100),))
    jobs.cluster.settle()
    assert sorted(map(str, jobs.places(big))) == ["n0", "n1", "n2", "n3"]
    assert jobs.message(small).startswith("WaitingForGPUs: 0 of 1 pods fit")


def test_a_higher_priority_and_another_namespace_go_first() -> None:
    jobs = Jobs(ready_node("n0"), ready_node("n1"))
    jobs.start()
    first, second = jobs.submit("first", 2), jobs.submit("second", 2)
    other, urgent = jobs.submit("other", 2, "team"), jobs.submit("urgent", 2)
    jobs.cluster.settle()
    jobs.set_priority(urgent, 1000)
    jobs.cluster.settle()
    place = {key: jobs.message(key).split(":")[0] for key in (first, second, other, urgent)}
    assert place == {
        urgent: "Queued 1 of 4",
        other: "Queued 2 of 4",
        first: "Queued 3 of 4",
        second: "Queued 4 of 4",
    }


def test_a_run_that_fails_keeps_its_place_before_jobs_that_never_ran() -> None:
    jobs = Jobs(ready_node("n0"), ready_node("n1"))
    jobs.start()
    jobs.train(10)
    other = jobs.submit("other", 2, "team")
    jobs.cluster.settle()
    jobs.cluster.end(jobs.gang[0], Cause.HANG)
    for _ in range(6):
        jobs.cluster.settle()
        jobs.cluster.collect()
        jobs.answer_tasks("list", saves=[])
        jobs.cluster.advance(1)
    assert jobs.attempt == 1
    assert sorted(map(str, jobs.places(JOB))) == ["n0", "n1"]
    assert jobs.places(other) == [None, None]


def test_a_run_that_comes_back_keeps_its_priority_until_its_next_pods_are_seen() -> None:
    jobs = Jobs(ready_node("n0"), ready_node("n1"))
    jobs.start()
    jobs.train(10)
    jobs.set_priority(JOB, 1000)
    lesser = jobs.submit("lesser", 2)
    jobs.cluster.settle()
    jobs.set_priority(lesser, 500)
    jobs.cluster.settle()
    jobs.cluster.end(jobs.gang[0], Cause.HANG)
    jobs.cluster.settle()
    jobs.cluster.collect()
    jobs.answer_tasks("list", saves=[])
    assert (jobs.attempt, "endedAt" in jobs.status["attempt"]) == (0, True), "the next attempt waits for its delay"
    assert jobs.message(lesser) == "Queued 2 of 2: others start first"
    assert jobs.places(lesser) == [None, None]


def test_only_a_run_that_ended_just_now_is_said_to_come_back() -> None:
    jobs = Jobs(ready_node("n0"), ready_node("n1"))
    jobs.start()
    jobs.train(10)
    jobs.cluster.end(jobs.gang[0], Cause.HANG)
    jobs.cluster.reconcile(JOB)
    ended = jobs.cluster.now
    assert applicant_of(jobs.job, [], ended) is not None
    assert applicant_of(jobs.job, [], ended + timedelta(seconds=COMES_BACK_S + 1)) is None
    jobs.cluster.change_spec(JOB, lambda spec: spec.setdefault("run", {}).update(suspend=True))
    jobs.cluster.settle()
    assert applicant_of(jobs.job, [], ended) is None


def test_a_gang_with_gates_of_others_holds_no_place() -> None:
    jobs = Jobs(ready_node("n0"), ready_node("n1"))
    small = jobs.submit("small", 2)
    jobs.cluster.change_spec(
        JOB, lambda spec: spec["workers"].update(podTemplate={"spec": {"schedulingGates": [{"name": "own"}]}})
    )
    jobs.cluster.settle()
    assert sorted(map(str, jobs.places(small))) == ["n0", "n1"]
    assert jobs.message(JOB).startswith("placed when the pods' other scheduling gates are gone")


# The loop's copy of the queue

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "pod", "priority", "place", "end", "node", "suspend", "ask"]), st.integers(0, 5)
    ),
    max_size=30,
)


class Loop:
    """The store and the capacity of an operator, fed from a simulated cluster."""

    def __init__(self) -> None:
        self.jobs = Jobs(ready_node("n0"), ready_node("n1"), ready_node("n2"))
        self.store, self.versions = Store(), 0
        self.capacity = CapacityWatch(lambda: None)
        self.rooms = RoomQueue(self.store, self.capacity, FakeClock(), lambda: None)
        self.waiting = WaitingGangs(self.store, self.capacity.use_of, FakeClock())
        self.seen: dict[Key, Any] = {}

    def watch(self) -> None:
        """Bring every change of the cluster to the informers' sinks."""
        for key, found in self.jobs.cluster.objects.items():
            if self.seen.get(key) != found:
                self.seen[key] = copy.deepcopy(found)
                for sink in (self.store, *((self.capacity,) if found["kind"] in ("Pod", "Node") else ())):
                    sink.put(copy.deepcopy(found))
        for key in [key for key in self.seen if key not in self.jobs.cluster.objects]:
            gone = self.seen.pop(key)
            self.store.remove(key, gone["metadata"]["uid"])
            self.capacity.remove(key, gone["metadata"]["uid"])

    def fresh(self) -> dict[str, Any]:
        """The queue from scratch."""
        jobs, pods = self.store.of_kind("TrainingJob"), self.store.of_kind("Pod")
        applicants, holdings = read_queue(jobs, pods, self.capacity.use_of, START)
        return decide(applicants, self.capacity.nodes(), holdings)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_the_turns_that_are_kept_equal_those_from_scratch(events: list[tuple[str, int]]) -> None:
    loop = Loop()
    cluster = loop.jobs.cluster
    keys = [JOB]
    for event, number in events:
        key = keys[number % len(keys)]
        if event == "submit":
            keys.append(loop.jobs.submit(f"job{len(keys)}", 1 + number % 2, f"team{number % 2}"))
        elif event == "pod":
            for _ in range(3):
                cluster.reconcile(key)
        elif event == "priority":
            loop.jobs.set_priority(key, number)
        elif event == "place":
            cluster.reconcile(key)
        elif event == "end":
            for pod in cluster.pods("trainer")[number:]:
                cluster.kill(pod)
        elif event == "node":
            cluster.add(ready_node(f"m{number}"))
        elif event == "suspend":
            cluster.change_spec(key, lambda spec: spec.setdefault("run", {}).update(suspend=True))
            cluster.reconcile(key)
        loop.watch()
        expected = loop.fresh()
        for asking in keys:
            others = expected.keys() - {f"{asking.namespace}/{asking.name}"}
            assert loop.waiting.others_wait(asking) == bool(others)
        for name, turn in expected.items():
            namespace, _, job = name.partition("/")
            seen = Observed(cluster.objects[Key("TrainingJob", namespace, job)])
            found = loop.rooms.observed(Key("TrainingJob", namespace, job), seen, loop.capacity.nodes())
            assert found.turn == turn
            if turn.nodes is not None:
                assert {node.name for node in found.nodes or ()} == {*turn.nodes}


def test_a_job_in_no_queue_asks_for_no_further_pass() -> None:
    asked: list[int] = []
    loop = Loop()
    loop.rooms = RoomQueue(loop.store, loop.capacity, FakeClock(), lambda: asked.append(1))
    template = {"spec": {"schedulingGates": [{"name": "own"}]}}
    loop.jobs.cluster.change_spec(JOB, lambda spec: spec["workers"].update(podTemplate=template))
    for _ in range(6):
        loop.jobs.cluster.reconcile(JOB)
    loop.watch()
    asked.clear()
    for _ in range(2):
        assert loop.rooms.observed(JOB, Observed(loop.jobs.job), loop.capacity.nodes()).turn is None
    assert asked == []


def test_the_last_gang_that_waited_is_forgotten_when_its_job_is_gone() -> None:
    loop = Loop()
    big = loop.jobs.submit("big", 3)
    for key in (JOB, big):
        for _ in range(6):
            loop.jobs.cluster.reconcile(key)
    loop.watch()
    assert loop.rooms.waiting
    for pod in loop.jobs.cluster.pods("trainer"):
        loop.jobs.cluster.vanish(pod)
    loop.jobs.cluster.objects.pop(big)
    loop.watch()
    assert not loop.rooms.waiting


def test_a_gang_that_no_end_of_a_run_helps_keeps_no_run_from_growing() -> None:
    """The end of every run would not make room for four pods on three nodes; three pods wait for the room of one."""
    loop = Loop()
    for _ in range(6):
        loop.jobs.cluster.reconcile(JOB)
    hopeless, later = loop.jobs.submit("hopeless", 4), loop.jobs.submit("later", 3)
    for key, waiting in ((hopeless, False), (later, True)):
        for _ in range(6):
            loop.jobs.cluster.reconcile(key)
        loop.watch()
        assert loop.rooms.waiting == waiting


def test_a_decision_is_kept_while_it_rests_and_a_late_job_is_told_to_come_again() -> None:
    asked: list[int] = []
    loop, clock = Loop(), FakeClock()
    loop.rooms = RoomQueue(loop.store, loop.capacity, clock, lambda: asked.append(1))
    late = loop.jobs.submit("late", 1)
    loop.jobs.cluster.objects.pop(Key("Node", "", "n2"))
    loop.jobs.cluster.objects.pop(Key("Node", "", "n1"))
    for _ in range(6):
        loop.jobs.cluster.reconcile(JOB)
    loop.watch()
    seen = Observed(loop.jobs.job)
    assert loop.rooms.observed(JOB, seen, loop.capacity.nodes()).turn is not None
    loop.rooms._rest_until = clock.monotonic() + 1
    for _ in range(6):
        loop.jobs.cluster.reconcile(late)
    loop.watch()
    asked.clear()
    turn = loop.rooms.observed(late, Observed(loop.jobs.cluster.objects[late]), loop.capacity.nodes()).turn
    assert turn is not None
    assert (turn.position, turn.nodes, bool(asked)) == (2, None, True)
    assert loop.rooms.next_passes([JOB, late]) == [late, JOB]


def test_a_run_that_does_not_come_back_gives_its_place_up_though_nothing_changes() -> None:
    asked: list[int] = []
    loop, clock = Loop(), FakeClock()
    loop.rooms = RoomQueue(loop.store, loop.capacity, clock, lambda: asked.append(1))
    loop.jobs.cluster.objects.pop(Key("Node", "", "n2"))
    loop.jobs.start()
    loop.jobs.train(10)
    other = loop.jobs.submit("other", 2, "team")
    loop.jobs.cluster.settle()
    for pod in loop.jobs.gang:
        loop.jobs.cluster.end(pod, Cause.HANG)
    loop.jobs.cluster.reconcile(JOB)
    loop.watch()
    other_job = Observed(loop.jobs.cluster.objects[other])
    held = loop.rooms.observed(other, other_job, loop.capacity.nodes()).turn
    assert held is not None
    assert (held.position, held.nodes) == (2, None)
    asked.clear()
    left_s = loop.rooms.left_s()
    assert left_s is not None
    clock.passed_s += left_s
    free = loop.rooms.observed(other, other_job, loop.capacity.nodes()).turn
    assert free is not None
    assert (free.position, {*(free.nodes or ())}) == (1, {"n0", "n1"})
    assert asked, "the others that wait get a pass, too"
    assert loop.rooms.left_s() is None
