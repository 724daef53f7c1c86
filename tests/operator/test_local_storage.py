"""The object store's acknowledgements: acknowledged objects are on the disk.

The storage may fail, and files may be damaged or missing.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.cluster.interface import NotFound, ServerError
from stoker.operator.cluster.local.object_files import ObjectFiles
from stoker.operator.cluster.local.object_storage import StateFolderError
from stoker.operator.cluster.local.objects import ObjectStore
from stoker.operator.cluster.local.whole_file import write_whole
from stoker.operator.domain.plan import Key, Object
from stoker.operator.loop.operator import Operator
from testing.operator.cluster_contract import config_map, pool, ref_of
from testing.operator.fakes import Embedded, FakePods, embedded, settle
from tests.operator.test_local_pods import claim, now, pod
from tests.operator.test_operator_loop import SETTINGS, reconcile_pods

START = datetime(2026, 1, 1, tzinfo=UTC)


class Disk:
    """A storage that writes files unless it is full."""

    def __init__(self) -> None:
        self.full = False

    def write(self, file: Path, content: bytes) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        write_whole(file, content)


def new_store(folder: Path, disk: Disk | None = None) -> ObjectStore:
    numbers = itertools.count(1)
    files = ObjectFiles(folder, write=(disk or Disk()).write)
    return ObjectStore(now=lambda: START, new_uid=lambda: f"uid-{next(numbers)}", storage=files)


def contents(store: ObjectStore) -> list[Object]:
    return [item for kind in ("ConfigMap", "Service", "Pod", "TrainingJob") for item in store.of_kind(kind)]


def changes(store: ObjectStore) -> dict[str, Callable[[], Any]]:
    """Yield every kind of write, on the objects that the test made."""
    one, service = Key("ConfigMap", "default", "one"), Key("Service", "default", "svc")
    return {
        "create": lambda: store.create(config_map("two")),
        "apply anew": lambda: store.apply(config_map("two"), "us"),
        "apply": lambda: store.apply(config_map("one", a="2"), "us"),
        "apply the same": lambda: store.apply(config_map("one", a="1"), "them"),
        "patch": lambda: store.patch(ref_of(store.get(one)), {"data": {"a": "2"}}),
        "status": lambda: store.update_status(ref_of(store.get(service)), {"x": 1}),
        "delete": lambda: store.delete(ref_of(store.get(one))),
    }


@pytest.mark.parametrize("name", ["create", "apply anew", "apply", "apply the same", "patch", "status", "delete"])
def test_a_write_that_fails_changes_nothing_and_can_be_repeated(tmp_path: Path, name: str) -> None:
    disk = Disk()
    store = new_store(tmp_path, disk)
    store.apply(config_map("one", a="1"), "us")
    store.create({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "svc"}, "spec": {}})
    told: list[Any] = []
    store.listeners.append(told.append)
    before, version = contents(store), store.version
    disk.full = True
    with pytest.raises(StateFolderError, match=r"the state folder cannot be written: .*: No space left on device"):
        changes(store)[name]()
    assert (contents(store), store.version, told) == (before, version, [])
    assert contents(new_store(tmp_path)) == before
    assert store.problems() != []
    disk.full = False
    changes(store)[name]()
    assert store.problems() == []
    assert contents(new_store(tmp_path)) == contents(store)


def owner_reference(owner: Object) -> dict[str, str]:
    metadata = owner["metadata"]
    return {"apiVersion": "v1", "kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"]}


def test_a_failure_is_a_server_error_that_the_operator_tries_again() -> None:
    assert issubclass(StateFolderError, ServerError)


def test_an_idle_store_finds_out_that_there_is_space_again(tmp_path: Path) -> None:
    disk = Disk()
    store = new_store(tmp_path, disk)
    disk.full = True
    with pytest.raises(StateFolderError):
        store.create(config_map("one"))
    store.repair()
    assert "No space left on device; objects cannot be changed until it can" in store.problems()[0]
    disk.full = False
    store.repair()
    assert store.problems() == []


def test_dependents_that_could_not_be_deleted_with_their_owner_are_deleted_later(tmp_path: Path) -> None:
    class LastGasp(Disk):
        """A storage that is full after the next write."""

        def write(self, file: Path, content: bytes) -> None:
            super().write(file, content)
            self.full = self.full or self.armed

        armed = False

    disk = LastGasp()
    store = new_store(tmp_path, disk)
    owner = store.create(config_map("owner"))
    child = config_map("child")
    child["metadata"]["ownerReferences"] = [owner_reference(owner)]
    store.create(child)
    disk.armed = True
    store.delete(ref_of(owner))
    assert [item["metadata"]["name"] for item in contents(store)] == ["child"]
    disk.armed = disk.full = False
    store.repair()
    assert contents(store) == []


def test_a_full_disk_keeps_no_store_from_starting(tmp_path: Path) -> None:
    new_store(tmp_path).create(config_map("one"))
    (tmp_path / "index.json").unlink()
    disk = Disk()
    disk.full = True
    store = new_store(tmp_path, disk)
    assert len(contents(store)) == 1
    disk.full = False
    store.create(config_map("two"))
    (tmp_path / "ConfigMap" / "default" / "one.json").unlink()
    assert "ConfigMap default/one is lost" in new_store(tmp_path).problems()[0]


# The kubelet on a full disk


def run(tmp_path: Path, story: Callable[[Embedded, Disk], Awaitable[None]]) -> None:
    async def whole() -> None:
        disk = Disk()
        world = embedded(tmp_path, keeper=ObjectFiles(tmp_path / "objects", write=disk.write))
        try:
            await story(world, disk)
        finally:
            await world.kubelet.stop(0)

    asyncio.run(whole())


def test_the_end_of_a_pod_on_a_full_disk_is_written_when_there_is_space(tmp_path: Path) -> None:
    async def story(world: Embedded, disk: Disk) -> None:
        world.objects.create(pod())
        await settle()
        disk.full = True
        world.runner.processes[0].end(3)
        await world.clock.advance(45)
        assert now(world)["status"]["phase"] == "Running"
        assert world.kubelet.running == 1
        disk.full = False
        await world.clock.advance(2)
        assert now(world)["status"]["phase"] == "Failed"
        assert now(world)["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
        assert world.kubelet.running == 0

    run(tmp_path, story)


def test_a_pod_that_waits_for_its_gates_on_a_full_disk_runs_later(tmp_path: Path) -> None:
    async def story(world: Embedded, disk: Disk) -> None:
        made = world.objects.create(pod(spec={"schedulingGates": [{"name": "stoker.dev/placement"}]}))
        await settle()
        world.objects.patch(ref_of(made), {"spec": {"schedulingGates": []}})
        disk.full = True
        await world.clock.advance(30)
        assert world.runner.processes == []
        disk.full = False
        await world.clock.advance(5)
        assert now(world)["status"]["phase"] == "Running"

    run(tmp_path, story)


def test_volumes_that_cannot_be_written_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"volumes": [{"name": "config", "configMap": {"name": "config"}}]}
    real = Path.mkdir

    async def story(world: Embedded, _: Disk) -> None:
        world.objects.create(config_map("config", a="1"))

        def full(path: Path, *given: Any, **named: Any) -> None:
            if path.is_relative_to(tmp_path / "pods"):
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            real(path, *given, **named)

        monkeypatch.setattr(Path, "mkdir", full)
        world.objects.create(pod(spec=spec))
        await world.clock.advance(10)
        waiting = now(world)["status"]["containerStatuses"][0]["state"]["waiting"]
        assert "No space left on device" in waiting["message"]
        monkeypatch.setattr(Path, "mkdir", real)
        await world.clock.advance(3)
        assert now(world)["status"]["phase"] == "Running"

    run(tmp_path, story)


def test_a_deleted_pod_goes_once_there_is_space(tmp_path: Path) -> None:
    async def story(world: Embedded, disk: Disk) -> None:
        made = world.objects.create(pod())
        await settle()
        world.objects.delete(ref_of(made))
        disk.full = True
        await world.clock.advance(5)
        assert world.objects.find(Key("Pod", "default", "pod")) is not None
        disk.full = False
        await world.clock.advance(3)
        assert world.objects.find(Key("Pod", "default", "pod")) is None

    run(tmp_path, story)


def test_a_claim_that_could_not_be_bound_is_bound_later(tmp_path: Path) -> None:
    async def story(world: Embedded, disk: Disk) -> None:
        def fill(record: Any) -> None:
            disk.full = record.object["metadata"]["name"] == "disk" and record.type == "ADDED"

        world.objects.listeners.insert(0, fill)
        world.objects.create(claim("disk"))
        await settle()
        bound = Key("PersistentVolumeClaim", "default", "disk")
        assert world.objects.get(bound).get("status") is None
        disk.full = False
        await world.clock.advance(2)
        assert world.objects.get(bound)["status"]["phase"] == "Bound"

    run(tmp_path, story)


def test_a_shut_down_on_a_full_disk_ends(tmp_path: Path) -> None:
    async def story(world: Embedded, disk: Disk) -> None:
        world.objects.create(pod())
        await settle()
        disk.full = True
        await asyncio.gather(world.kubelet.stop(), world.clock.advance(5))
        assert world.kubelet.running == 0
        assert not world.runner.processes[0].alive
        world.kubelet.start()

    run(tmp_path, story)


def test_a_life_that_breaks_is_reported_and_leaves_no_process(tmp_path: Path) -> None:
    async def story(world: Embedded, _: Disk) -> None:
        probe = {"httpGet": {"path": "/", "port": "no-such-port"}, "periodSeconds": 1}
        world.objects.create(pod(livenessProbe=probe))
        await world.clock.advance(3)
        assert now(world)["status"]["phase"] == "Failed"
        ended = now(world)["status"]["containerStatuses"][0]["state"]["terminated"]
        assert ended["reason"] == "InternalError"
        assert "no port named 'no-such-port'" in ended["message"]
        assert not world.runner.processes[0].alive

    run(tmp_path, story)


def test_the_operator_goes_on_by_itself_after_a_full_disk(tmp_path: Path) -> None:
    """A pod ends while nothing can be written: it is replaced once there is space."""

    async def whole() -> None:
        disk = Disk()
        world = embedded(tmp_path, pods=FakePods(), keeper=ObjectFiles(tmp_path / "objects", write=disk.write))
        reconcilers = {"EnginePool": reconcile_pods}
        operator = Operator(world.cluster, SETTINGS, reconcilers, clock=world.clock, jitter=lambda: 0.5)
        running = asyncio.ensure_future(operator.run())
        await settle()
        world.objects.create(pool("pool", replicas=1))
        await world.clock.advance(5)
        assert len(world.runner.processes) == 1
        disk.full = True
        world.runner.processes[0].end(1)
        await world.clock.advance(45)
        assert [now(world, "pool-0")["status"]["phase"], len(world.runner.processes)] == ["Running", 1]
        disk.full = False
        await world.clock.advance(60)
        assert [now(world, "pool-0")["status"]["phase"], len(world.runner.processes)] == ["Running", 2]
        running.cancel()
        await world.kubelet.stop(0)

    asyncio.run(whole())


# Damaged and missing files


def job_file(folder: Path) -> Path:
    return folder / "ConfigMap" / "default" / "one.json"


def without_checksum(content: bytes) -> bytes:
    """Return a file's content in the form of an earlier version, without a checksum."""
    return content.partition(b"\n")[2]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a flipped letter": lambda content: content.replace(b'"ConfigMap"', b'"ConfigMbp"'),
    "a flipped letter, no checksum": lambda content: without_checksum(content).replace(b'"ConfigMap"', b'"ConfigMbp"'),
    "a missing uid, no checksum": lambda content: without_checksum(content).replace(b'"uid"', b'"uxd"'),
    "half of it": lambda content: content[: len(content) // 2],
    "half of it, no checksum": lambda content: without_checksum(content)[:-20],
    "nothing": lambda _: b"",
    "a damaged checksum": lambda content: content.replace(b"sha256", b"sha257"),
    "other bytes": lambda _: b"\xff\xfe\x00",
    "a list": lambda _: b"[]",
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_file_is_set_aside_by_name_and_the_others_load(tmp_path: Path, damage: str) -> None:
    store = new_store(tmp_path)
    uid = store.create(config_map("one"))["metadata"]["uid"]
    store.create(config_map("two"))
    file = job_file(tmp_path)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    for _ in range(2):  # the second start reports it again
        again = new_store(tmp_path)
        assert [item["metadata"]["name"] for item in contents(again)] == ["two"]
        (problem,) = again.problems()
        assert problem.startswith(f"ConfigMap default/one is lost: {file}.damaged: ")
        assert again.lost[Key("ConfigMap", "default", "one")].uid == uid
    assert not file.exists()


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    store.create(config_map("one"))
    file = job_file(tmp_path)
    content = file.read_bytes()
    for place in range(0, len(content), 7):
        for aside in file.parent.glob("*.damaged"):
            aside.unlink()
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        file.write_bytes(bytes(flipped))
        assert contents(new_store(tmp_path)) == [], place


def test_a_missing_object_is_reported_until_it_is_given_up(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    owner = store.create(config_map("one"))
    child = config_map("child")
    child["metadata"]["ownerReferences"] = [owner_reference(owner)]
    store.create(child)
    content = job_file(tmp_path).read_bytes()
    job_file(tmp_path).unlink()
    again = new_store(tmp_path)
    key = Key("ConfigMap", "default", "one")
    assert f"{job_file(tmp_path)}: the file is missing" in again.problems()[0]
    assert [item["metadata"]["name"] for item in contents(again)] == ["child"]  # its owner may come back
    job_file(tmp_path).write_bytes(content)
    assert new_store(tmp_path).problems() == []
    job_file(tmp_path).unlink()
    last = new_store(tmp_path)
    last.give_up(key)
    assert (contents(last), last.problems()) == ([], [])
    assert new_store(tmp_path).problems() == []
    with pytest.raises(NotFound):
        last.give_up(key)


def test_an_object_that_is_made_anew_is_lost_no_more(tmp_path: Path) -> None:
    new_store(tmp_path).create(config_map("one"))
    job_file(tmp_path).unlink()
    store = new_store(tmp_path)
    store.create(config_map("one", a="1"))
    assert store.problems() == []
    assert contents(new_store(tmp_path)) == contents(store)


def test_files_of_an_earlier_version_load_and_are_watched_from_then_on(tmp_path: Path) -> None:
    before = contents_of_an_earlier_version(tmp_path)
    store = new_store(tmp_path)
    assert (contents(store), store.problems()) == (before, [])
    job_file(tmp_path).unlink()
    assert "ConfigMap default/one is lost" in new_store(tmp_path).problems()[0]


def contents_of_an_earlier_version(folder: Path) -> list[Object]:
    store = new_store(folder)
    for name in ("one", "two"):
        store.apply(config_map(name), "us")
    for file in folder.glob("*/*/*.json"):
        file.write_bytes(without_checksum(file.read_bytes()))
        json.loads(file.read_text())
    (folder / "index.json").unlink()
    return contents(store)


def test_a_damaged_index_is_reported_and_made_anew(tmp_path: Path) -> None:
    new_store(tmp_path).create(config_map("one"))
    index = tmp_path / "index.json"
    index.write_bytes(index.read_bytes().replace(b"ConfigMap", b"ConfigMbp"))
    store = new_store(tmp_path)
    assert len(contents(store)) == 1
    (problem,) = store.problems()
    assert problem.startswith(f"{index}.damaged: the checksum does not match")
    assert new_store(tmp_path).problems() == []


@pytest.mark.parametrize("crash_after", range(1, 5))
def test_a_crash_between_two_files_reports_nothing_lost(tmp_path: Path, crash_after: int) -> None:
    """A create and a delete write an object file and the index; after a crash in between either outcome is right."""

    class Crash(Exception):
        """A crash; it is no OSError, so that no code cleans up after it."""

    class Dying(Disk):
        writes = 0

        def write(self, file: Path, content: bytes) -> None:
            self.writes += 1
            if self.writes == crash_after + 3:  # the first index and object take three
                raise Crash
            super().write(file, content)

    store = new_store(tmp_path, Dying())
    one = store.create(config_map("one"))
    try:
        store.create(config_map("two"))
        store.delete(ref_of(one))
        store.create(config_map("three"))
    except Crash:
        pass
    again = new_store(tmp_path)
    assert again.problems() == []
    assert {item["metadata"]["name"] for item in contents(again)} >= {
        item["metadata"]["name"] for item in contents(store)
    } - {"one"}
