"""Progress: following objects until they have settled."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from stoker.cli.follow_scope import EventScope, Name
from stoker.cli.progress import Follower, JsonLines, Lines

JOB = Name("TrainingJob", "default", "teach")
CHAT = Name("InferenceDeployment", "default", "chat")


def found(name: Name, phase: str, *, stalled: bool = False, **status: Any) -> dict[str, Any]:
    conditions = [{"type": "Stalled", "status": "True"}] if stalled else []
    return {
        "kind": name.kind,
        "metadata": {"name": name.name, "namespace": name.namespace, "uid": f"uid-{name.name}", "generation": 1},
        "status": {"phase": phase, "observedGeneration": 1, "conditions": conditions, **status},
    }


class Film:
    """A supervisor that shows one picture per look; the last one stays."""

    def __init__(self, *pictures: list[dict[str, Any]], events: tuple[dict[str, Any], ...] = ()) -> None:
        self.pictures = list(pictures)
        self.events = events
        self.time_s = 0.0
        self.problems: list[str] = []

    def objects(self, kind: str) -> list[dict[str, Any]]:
        if kind == "Event":
            return list(self.events)
        return [item for item in self.pictures[0] if item["kind"] == kind]

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        if len(self.pictures) > 1:
            self.pictures.pop(0)


class Silent:
    def __init__(self) -> None:
        self.said: list[str] = []

    def show(self, objects: Iterable[Mapping[str, Any]]) -> None:
        list(objects)

    def say(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None: ...


def follow(film: Film, *wanted: Name, timeout_s: float | None = 60) -> tuple[bool | None, float, list[str]]:
    screen = Silent()
    since = "2026-01-01T12:00:00Z"
    follower = Follower(film, screen, wanted, since, sleep=film.sleep, monotonic=lambda: film.time_s)
    return follower.until_settled(timeout_s), film.time_s, screen.said


def test_it_ends_when_all_that_is_wanted_is_good() -> None:
    film = Film(
        [found(JOB, "Running"), found(CHAT, "WaitingForCheckpoint")],
        [found(JOB, "Completed"), found(CHAT, "Starting")],
        [found(JOB, "Completed"), found(CHAT, "Serving")],
    )
    assert follow(film, JOB, CHAT)[:2] == (True, 1.0)


def test_a_failure_ends_it_at_once() -> None:
    assert follow(Film([found(JOB, "Running")], [found(JOB, "Failed")]), JOB)[:2] == (False, 0.5)


def test_a_stall_that_passes_is_no_failure() -> None:
    stalled = [found(JOB, "Pending", stalled=True)]
    assert follow(Film(stalled, stalled, [found(JOB, "Completed")]), JOB)[0] is True


def test_a_stall_that_stays_is_one() -> None:
    assert follow(Film([found(JOB, "Pending", stalled=True)]), JOB)[:2] == (False, 5.0)


def test_an_object_that_was_deleted_is_a_failure() -> None:
    assert follow(Film([]), JOB)[0] is False


def test_the_time_can_be_limited() -> None:
    assert follow(Film([found(JOB, "Running")]), JOB, timeout_s=3)[0] is None


def test_nothing_to_wait_for_is_settled() -> None:
    assert follow(Film([found(JOB, "Running")]))[0] is True


def test_a_warning_is_said_once_and_an_old_one_never() -> None:
    event = {
        "type": "Warning",
        "reason": "Refused",
        "message": "no",
        "metadata": {"uid": "e1"},
        "involvedObject": {"kind": "TrainingJob", "name": "teach"},
        "lastTimestamp": "2026-01-01T12:00:05Z",
    }
    old = {**event, "metadata": {"uid": "e0"}, "message": "old", "lastTimestamp": "2026-01-01T11:00:00Z"}
    cause = {**event, "metadata": {"uid": "e2"}, "reason": "DataError", "message": "DataError: no file"}
    of_start = {**event, "metadata": {"uid": "e3"}, "reason": "Unhealthy", "message": "Startup probe failed: refused"}
    hangs = {**of_start, "metadata": {"uid": "e4"}, "message": "Liveness probe failed: timeout"}
    events = (old, event, cause, of_start, hangs)
    film = Film([found(JOB, "Running")], [found(JOB, "Running")], [found(JOB, "Completed")], events=events)
    assert follow(film, JOB)[2] == [
        "warning: TrainingJob teach: Refused: no",
        "warning: TrainingJob teach: DataError: no file",
        "warning: TrainingJob teach: Unhealthy: Liveness probe failed: timeout",
    ]


def test_what_others_do_in_the_namespace_is_not_shown() -> None:
    """A namespace is a team's: of its other jobs and deployments nothing is said, however much alike their names."""

    def warning(kind: str, name: str, *, uid: str = "", **fields: Any) -> dict[str, Any]:
        about = {"kind": kind, "namespace": "default", "name": name, "uid": uid or f"uid-{name}"}
        metadata = {"uid": f"of-{kind}-{name}-{uid}-{len(fields)}"}
        event = {"type": "Warning", "reason": "Refused", "message": name, "metadata": metadata, "involvedObject": about}
        return {**event, "lastTimestamp": "2026-01-01T12:00:05Z", **fields}

    def pod(name: str, job: Name) -> dict[str, Any]:
        labels = {"stoker.dev/job-uid": f"uid-{job.name}"}
        metadata = {"name": name, "namespace": "default", "uid": f"uid-{name}", "labels": labels}
        return {"kind": "Pod", "metadata": metadata}

    other, save = Name("TrainingJob", "default", "teach-a0"), Name("Checkpoint", "default", "a-save")
    saves = [
        {**found(save, "Complete"), "spec": {"source": {"save": {"jobRef": {"name": "teach"}}}}},
        {**found(save._replace(name="b-save"), "Saving"), "spec": {"source": {"jobRef": {"name": "teach"}}}},
        {**found(save._replace(name="c-save"), "Saving"), "spec": {"source": {"jobRef": {"name": "teach-a0"}}}},
    ]
    by_scheduler: dict[str, Any] = {"lastTimestamp": None, "message": "0/3 nodes"}
    own = (
        warning("TrainingJob", "teach"),
        warning("Pod", "teach-a0-1"),
        warning("Pod", "teach-a0-1", **by_scheduler, eventTime="2026-01-01T12:00:00.000001Z"),
        warning("Checkpoint", "b-save"),
        warning("PersistentVolumeClaim", "data"),
        warning("PersistentVolumeClaim", "models"),
    )
    foreign = (
        warning("TrainingJob", "teach-a0"),
        warning("TrainingJob", "teach", uid="of an earlier one"),
        warning("Pod", "teach-a0-0"),
        warning("Pod", "teach-a0-1", uid="of an earlier one"),
        warning("Pod", "teach-a0-1", **by_scheduler, eventTime="2026-01-01T11:59:59.999999Z"),
        warning("Pod", "teach-a0-2"),
        warning("Node", "teach-a0-1", uid="a node"),
        warning("PersistentVolumeClaim", "teach-data"),
    )
    pods = {"teach-a0-1": pod("teach-a0-1", JOB), "teach-a0-0": pod("teach-a0-0", other)}
    asked: list[str] = []

    def read(kind: str, _namespace: str, name: str) -> Mapping[str, Any] | None:
        asked.append(f"{kind} {name}")
        return pods.get(name) if kind == "Pod" else None

    volumes = [{"claimName": "data"}, {"hostPath": "/x"}]
    job = {**found(JOB, "Running"), "spec": {"workers": {"volumes": volumes}, "model": {"uri": "pvc://models/a"}}}
    film = Film([job, found(other, "Failed"), found(CHAT, "Serving"), *saves], events=own + foreign)
    screen = Silent()
    follower = Follower(film, screen, [JOB], "2026-01-01T12:00:00Z", EventScope(read))
    shown = follower.look()
    assert [name.name for name in shown] == ["teach", "a-save", "b-save"]
    assert screen.said == [f"warning: {event['involvedObject']['kind']} {event['involvedObject']['name']}: Refused: "
                           f"{event['message']}" for event in own]  # fmt: skip
    reads = list(asked)
    follower.look()
    assert asked == reads, "each object is read once"
    follower.wanted = [JOB, other]
    follower.look()
    assert "warning: Pod teach-a0-0: Refused: teach-a0-0" in screen.said, "its job is shown only now"
    assert asked == reads
    assert len(Follower(film, Silent(), [JOB]).look()) == 6


def test_a_log_gets_each_phase_and_figures_now_and_then() -> None:
    lines: list[str] = []
    time_s = 0.0
    screen = Lines(lines.append, lambda: time_s)
    for step in range(30):
        time_s = step * 0.5
        screen.show([found(JOB, "Running", progress={"step": step, "totalSteps": 30})])
    screen.show([found(JOB, "Completed", progress={"step": 30, "totalSteps": 30})])
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "trainingjob/teach  Running  step 0/30",
        "trainingjob/teach  Running  step 10/30",
        "trainingjob/teach  Running  step 20/30",
        "trainingjob/teach  Completed  step 30/30",
    ]


def test_json_lines_tell_changes_only(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    screen = JsonLines(lines.append)
    for phase in ("Running", "Running", "Completed"):
        screen.show([found(JOB, phase, pinned={"rendered": "long"})])
    assert [json.loads(line)["status"]["phase"] for line in lines] == ["Running", "Completed"]
    assert "pinned" not in lines[0]
