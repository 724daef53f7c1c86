"""The kubelet of the embedded cluster, with processes and time in the test's hands."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.operator.cluster.interface import Invalid
from stoker.operator.cluster.local.object_files import ObjectFiles
from stoker.operator.cluster.local.volumes import LOCAL_FOLDER
from stoker.operator.domain.plan import Key, Object
from testing.operator.cluster_contract import config_map, ref_of
from testing.operator.fakes import Embedded, embedded, settle

Story = Callable[[Embedded], Awaitable[None]]


def pod(name: str = "pod", *, spec: Any = None, **container: Any) -> Object:
    main = {"name": "main", "image": "image:1", "command": ["python", "-m", "thing"], **container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": "thing"}},
        "spec": {"restartPolicy": "Never", "containers": [main], **(spec or {})},
    }


def run(tmp_path: Path, story: Story, **options: Any) -> None:
    async def whole() -> None:
        world = embedded(tmp_path, **options)
        try:
            await story(world)
        finally:
            await world.kubelet.stop(0)

    asyncio.run(whole())


def now(world: Embedded, name: str = "pod") -> Object:
    return world.objects.get(Key("Pod", "default", name))


def condition(found: Object, kind: str) -> tuple[str, str, str]:
    for known in found["status"]["conditions"]:
        if known["type"] == kind:
            return known["status"], known.get("reason", ""), known.get("message", "")
    return "", "", ""


def test_a_pod_runs_and_ends_as_a_kubelet_writes_it(tmp_path: Path) -> None:
    async def story(world: Embedded) -> None:
        world.objects.create(pod())
        await settle()
        found = now(world)
        assert found["spec"]["nodeName"] == "local"
        assert found["status"]["phase"] == "Running"
        assert found["status"]["podIP"] == "127.16.0.2"
        assert found["status"]["containerStatuses"] == [
            {
                "name": "main",
                "image": "image:1",
                "imageID": "",
                "restartCount": 0,
                "ready": True,
                "started": True,
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                "lastState": {},
                "containerID": "process://1000",
            }
        ]
        assert {c["type"]: c["status"] for c in found["status"]["conditions"]} == {
            "Initialized": "True",
            "Ready": "True",
            "ContainersReady": "True",
            "PodScheduled": "True",
        }
        await world.clock.advance(60)
        (tmp_path / "pods" / found["metadata"]["uid"] / "termination-log").write_text('{"cause":"Completed"}')
        world.runner.processes[0].end(0)
        await settle()
        found = now(world)
        assert found["status"]["phase"] == "Succeeded"
        assert found["status"]["containerStatuses"][0]["state"]["terminated"] == {
            "exitCode": 0,
            "reason": "Completed",
            "startedAt": "2026-01-01T00:00:00Z",
            "finishedAt": "2026-01-01T00:01:00Z",
            "containerID": "process://1000",
            "message": '{"cause":"Completed"}',
        }
        assert condition(found, "Ready") == ("False", "PodCompleted", "")

    run(tmp_path, story)


@pytest.mark.parametrize(("code", "signal"), [(65, None), (137, 9)], ids=["code", "signal"])
def test_a_failure_keeps_exit_code_and_signal(tmp_path: Path, code: int, signal: int | None) -> None:
    async def story(world: Embedded) -> None:
        world.objects.create(pod())
        await settle()
        world.runner.processes[0].end(code, signal)
        await settle()
        assert now(world)["status"]["phase"] == "Failed"
        ended = now(world)["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (ended["exitCode"], ended["reason"], ended.get("signal")) == (code, "Error", signal)

    run(tmp_path, story)


def test_a_gated_pod_waits_for_its_gates(tmp_path: Path) -> None:
    async def story(world: Embedded) -> None:
        made = world.objects.create(pod(spec={"schedulingGates": [{"name": "stoker.dev/placement"}]}))
        await settle()
        assert now(world)["status"]["phase"] == "Pending"
        assert condition(now(world), "PodScheduled")[:2] == ("False", "SchedulingGated")
        world.objects.patch(ref_of(made), {"spec": {"schedulingGates": []}})
        await settle()
        assert now(world)["status"]["phase"] == "Running"

    run(tmp_path, story)


def test_a_pod_waits_for_its_claim_then_for_its_config_map(tmp_path: Path) -> None:
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "disk"}},
        {"name": "config", "configMap": {"name": "config"}},
    ]

    async def story(world: Embedded) -> None:
        world.objects.create(pod(spec={"volumes": volumes}))
        await settle()
        unbound = ("False", "Unschedulable", 'persistentvolumeclaim "disk" not found')
        assert condition(now(world), "PodScheduled") == unbound
        world.objects.create(claim("disk"))
        await settle()
        assert world.objects.get(Key("PersistentVolumeClaim", "default", "disk"))["status"]["phase"] == "Bound"
        waiting = now(world)["status"]["containerStatuses"][0]["state"]["waiting"]
        assert waiting == {"reason": "ContainerCreating", "message": 'configmap "config" not found'}
        world.objects.create(config_map("config"))
        await settle()
        assert now(world)["status"]["phase"] == "Running"

    run(tmp_path, story)


def claim(name: str, folder: Path | None = None) -> Object:
    annotations = {"annotations": {LOCAL_FOLDER: str(folder)}} if folder else {}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "default", **annotations},
        "spec": {"accessModes": ["ReadWriteMany"]},
    }


def test_volumes_are_folders_and_their_paths_are_rewritten(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    volumes = [
        {"name": "config", "configMap": {"name": "config"}},
        {"name": "secret", "secret": {"secretName": "secret"}},
        {"name": "models", "persistentVolumeClaim": {"claimName": "models"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
        {"name": "scratch", "emptyDir": {}},
        {"name": "host", "hostPath": {"path": str(tmp_path)}},
    ]
    places = {
        "config": "/etc/app",
        "secret": "/etc/app-secret",
        "models": "/models",
        "runs": "/runs",
        "scratch": "/scratch",
        "host": "/host",
    }
    mounts = [{"name": name, "mountPath": path} for name, path in places.items()]
    mounts.append({"name": "runs", "mountPath": "/runs-one", "subPath": "one"})
    paths = {"model": "/models/m1", "out": "/runs/x", "log": "/dev/termination-log"}
    config = json.dumps(paths | {"other": "/modelsX", "data": "/etc/application"})

    async def story(world: Embedded) -> None:
        world.objects.create(claim("models", models))
        world.objects.create(claim("runs"))
        world.objects.create(config_map("config", **{"config.json": config, "data.jsonl": '{"text": "see /models"}'}))
        encoded = base64.b64encode(b"hush /models").decode()
        world.objects.create({**config_map("secret", key=encoded), "kind": "Secret"})
        made = world.objects.create(
            pod(
                spec={"volumes": volumes},
                volumeMounts=mounts,
                command=["tool", "--model=/models/m1", "--one", "/runs-one", "x/models"],
            )
        )
        await settle()
        own = tmp_path / "pods" / made["metadata"]["uid"]
        runs = tmp_path / "claims" / "default" / "runs"
        command = world.runner.processes[0].command
        assert list(command.argv) == ["tool", f"--model={models}/m1", "--one", f"{runs}/one", "x/models"]
        written = (own / "v" / "config" / "config.json").read_text()
        assert f'"model": "{models}/m1"' in written
        assert f'"out": "{runs}/x"' in written
        assert f'"log": "{own}/termination-log"' in written
        assert '"other": "/modelsX"' in written
        assert '"data": "/etc/application"' in written
        assert (own / "v" / "config" / "data.jsonl").read_text() == '{"text": "see /models"}'
        assert (own / "v" / "secret" / "key").read_text() == "hush /models"
        assert runs.is_dir()
        assert (own / "v" / "scratch").is_dir()

    run(tmp_path, story)


def test_a_mount_above_the_interpreter_does_not_move_it(tmp_path: Path) -> None:
    async def story(world: Embedded) -> None:
        above = str(Path(world.kubelet.node.python).parents[1])
        volumes = [{"name": "scratch", "emptyDir": {}}]
        mounts = [{"name": "scratch", "mountPath": above}]
        world.objects.create(pod(spec={"volumes": volumes}, volumeMounts=mounts, command=["python", f"{above}/x"]))
        await settle()
        argv = world.runner.processes[0].command.argv
        assert argv[0] == world.kubelet.node.python
        assert argv[1] != f"{above}/x"

    run(tmp_path, story)


def test_a_changed_config_map_reaches_a_running_pod(tmp_path: Path) -> None:
    spec = {"volumes": [{"name": "keys", "configMap": {"name": "keys"}}]}

    async def story(world: Embedded) -> None:
        keys = world.objects.create(config_map("keys", **{"a.pem": "old", "b.pem": "gone"}))
        made = world.objects.create(pod(spec=spec, volumeMounts=[{"name": "keys", "mountPath": "/keys"}]))
        await settle()
        folder = tmp_path / "pods" / made["metadata"]["uid"] / "v" / "keys"
        assert {file.name: file.read_text() for file in folder.iterdir()} == {"a.pem": "old", "b.pem": "gone"}
        world.objects.patch(ref_of(keys), {"data": {"a.pem": "new", "b.pem": None, "c.pem": "more"}})
        await settle()
        assert {file.name: file.read_text() for file in folder.iterdir()} == {"a.pem": "new", "c.pem": "more"}

    run(tmp_path, story)


def test_the_environment_is_the_pods_own(tmp_path: Path) -> None:
    env = [
        {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "APP", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "COLOR", "valueFrom": {"configMapKeyRef": {"name": "config", "key": "color"}}},
        {"name": "MISSING", "valueFrom": {"configMapKeyRef": {"name": "config", "key": "no", "optional": True}}},
        {"name": "GREETING", "value": "$(COLOR) sky, $(UNKNOWN), $$(COLOR)"},
    ]
    container: dict[str, Any] = {
        "env": env,
        "envFrom": [{"configMapRef": {"name": "config"}, "prefix": "C_"}],
        "command": ["python", "-c", "$(GREETING)"],
        "args": ["$(POD_NAME)"],
        "resources": {"limits": {"cpu": "1500m"}},
    }

    async def story(world: Embedded) -> None:
        world.objects.create(config_map("config", color="blue"))
        made = world.objects.create(pod(**container))
        await settle()
        command = world.runner.processes[0].command
        expected = {
            "PATH": "/bin",
            "POD_UID": made["metadata"]["uid"],
            "POD_NAME": "pod",
            "APP": "thing",
            "POD_IP": "127.16.0.2",
            "COLOR": "blue",
            "C_color": "blue",
            "GREETING": "blue sky, $(UNKNOWN), $(COLOR)",
            "OMP_NUM_THREADS": "2",
            "CUDA_VISIBLE_DEVICES": "",
        }
        assert {name: command.environment.get(name) for name in expected} == expected
        assert "MISSING" not in command.environment
        assert list(command.argv) == ["/usr/bin/python3", "-c", "blue sky, $(UNKNOWN), $(COLOR)", "pod"]

    run(tmp_path, story)


def test_a_pod_that_asks_for_what_this_machine_never_has_waits_and_says_so(tmp_path: Path) -> None:
    large: dict[str, Any] = {
        "cores": {"requests": {"cpu": "1000000000", "memory": "1Gi"}},
        "memory": {"limits": {"memory": "2Ti"}},
        "bit": {"requests": {"cpu": "64001m"}},
    }
    mig = {"resources": {"limits": {"nvidia.com/mig-1g.10gb": "1"}}}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one"}]

    async def story(world: Embedded) -> None:
        world.objects.create(pod("mig", **mig))
        for name, resources in large.items():
            world.objects.create(pod(name, resources=resources))
        claiming = pod("claims")
        world.objects.create({**claiming, "spec": {**claiming["spec"], "resourceClaims": claims}})
        await settle()
        for name, lacking in (
            ("cores", "Insufficient cpu (this machine has 64, 1000000000 are needed)"),
            ("memory", "Insufficient memory (this machine has 1024.0Gi, 2048.0Gi are needed)"),
            ("bit", "Insufficient cpu (this machine has 64, 64.001 are needed)"),
            ("mig", "Insufficient nvidia.com/mig-1g.10gb (the embedded cluster offers nvidia.com/gpu)"),
            ("claims", "cannot allocate all claims (the embedded cluster has no dynamic resource allocation; "
                       "use gpusPerPod)"),
        ):  # fmt: skip
            message = f"0/1 nodes are available: 1 {lacking}"
            assert condition(now(world, name), "PodScheduled") == ("False", "Unschedulable", message)
        assert world.runner.processes == []
        for name in ("one", "two"):  # pods share the cores; a limit may be any
            world.objects.create(pod(name, resources={"requests": {"cpu": "64"}, "limits": {"cpu": "1G"}}))
        await settle()
        assert [process.command.environment["OMP_NUM_THREADS"] for process in world.runner.processes] == ["64"] * 2

    run(tmp_path, story)


def test_gpus_go_to_one_pod_at_a_time_and_come_back(tmp_path: Path) -> None:
    def needs(count: int) -> Any:
        return {"resources": {"limits": {"nvidia.com/gpu": str(count)}}}

    async def story(world: Embedded) -> None:
        for name, count in (("a", 2), ("b", 1), ("c", 0)):
            world.objects.create(pod(name, **needs(count)))
        await settle()
        devices = [process.command.environment["CUDA_VISIBLE_DEVICES"] for process in world.runner.processes]
        assert devices == ["0,1", ""]
        message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu (0 of 2 are free, 1 are needed)"
        assert condition(now(world, "b"), "PodScheduled") == ("False", "Unschedulable", message)
        world.runner.processes[0].end(0)
        await settle()
        assert world.runner.processes[-1].command.environment["CUDA_VISIBLE_DEVICES"] == "0"

    run(tmp_path, story, gpus=("0", "1"))


def test_readiness_follows_the_probe(tmp_path: Path) -> None:
    probe = {"httpGet": {"path": "/readyz", "port": "http"}, "periodSeconds": 2, "failureThreshold": 2}
    ports = [{"name": "http", "containerPort": 8000}]

    async def story(world: Embedded) -> None:
        place = ("127.16.0.2", 8000)
        world.ready[place] = False
        world.objects.create(pod(readinessProbe=probe, ports=ports))
        await world.clock.advance(5)
        unready = ("False", "ContainersNotReady", "containers with unready status: [main]")
        assert condition(now(world), "Ready") == unready
        world.ready[place] = True
        await world.clock.advance(1)
        assert condition(now(world), "Ready")[0] == "True"
        world.ready[place] = False
        await world.clock.advance(2)
        assert condition(now(world), "Ready")[0] == "True"
        await world.clock.advance(3)
        assert condition(now(world), "Ready")[0] == "False"
        assert now(world)["status"]["phase"] == "Running"

    run(tmp_path, story)


@pytest.mark.parametrize("kind", ["startupProbe", "livenessProbe"])
def test_a_pod_that_fails_its_probe_is_stopped(tmp_path: Path, kind: str) -> None:
    probe = {"httpGet": {"path": "/livez", "port": 8000}, "periodSeconds": 1, "failureThreshold": 5}
    container: dict[str, Any] = {kind: probe}

    async def story(world: Embedded) -> None:
        if kind == "startupProbe":
            world.ready["127.16.0.2", 8000] = False
        world.objects.create(pod(**container))
        await world.clock.advance(3)
        assert now(world)["status"]["phase"] == "Running"
        world.ready["127.16.0.2", 8000] = False
        await world.clock.advance(8)
        assert world.runner.processes[0].signals == ["TERM"]
        assert now(world)["status"]["phase"] == "Failed"
        assert now(world)["status"]["reason"] == "Unhealthy"

    run(tmp_path, story)


def test_a_deleted_pod_gets_its_grace_period_then_is_killed(tmp_path: Path) -> None:
    async def story(world: Embedded) -> None:
        made = world.objects.create(pod(spec={"terminationGracePeriodSeconds": 10}))
        await settle()
        world.runner.processes[0].stubborn = True
        left = world.objects.delete(ref_of(made))
        assert left is not None
        assert left["metadata"]["deletionGracePeriodSeconds"] == 10
        await world.clock.advance(9)
        assert world.runner.processes[0].signals == ["TERM"]
        assert now(world)["metadata"]["deletionTimestamp"]
        await world.clock.advance(2)
        assert world.runner.processes[0].signals == ["TERM", "KILL"]
        assert world.objects.of_kind("Pod") == []
        assert list((tmp_path / "pods").iterdir()) == []

    run(tmp_path, story)


def test_a_forced_deletion_kills_at_once(tmp_path: Path) -> None:
    async def story(world: Embedded) -> None:
        made = world.objects.create(pod())
        await settle()
        world.runner.processes[0].stubborn = True
        world.objects.delete(ref_of(made))
        await settle()
        world.objects.delete(ref_of(made), grace_s=0)
        await settle()
        assert world.runner.processes[0].signals == ["TERM", "KILL"]
        assert world.objects.of_kind("Pod") == []

    run(tmp_path, story)


def test_a_deadline_ends_a_pod(tmp_path: Path) -> None:
    async def story(world: Embedded) -> None:
        world.objects.create(pod(spec={"activeDeadlineSeconds": 30}))
        await world.clock.advance(29)
        assert now(world)["status"]["phase"] == "Running"
        await world.clock.advance(2)
        assert (now(world)["status"]["phase"], now(world)["status"]["reason"]) == ("Failed", "DeadlineExceeded")

    run(tmp_path, story)


def test_a_shut_down_cluster_marks_its_pods_as_disrupted(tmp_path: Path) -> None:
    async def story(world: Embedded) -> None:
        world.objects.create(pod())
        await settle()
        await asyncio.gather(world.kubelet.stop(), world.clock.advance(1))
        assert world.runner.processes[0].signals == ["TERM"]
        assert now(world)["status"]["reason"] == "Terminated"
        assert condition(now(world), "DisruptionTarget")[:2] == ("True", "TerminationByKubelet")
        world.kubelet.start()

    run(tmp_path, story)


def test_pods_that_ran_when_the_last_supervisor_died_are_lost(tmp_path: Path) -> None:
    async def story(world: Embedded) -> None:
        world.objects.create(pod())
        world.objects.create(pod("gated", spec={"schedulingGates": [{"name": "x"}]}))
        await settle()
        again = embedded(tmp_path, keeper=ObjectFiles(tmp_path / "objects"))
        await settle()
        ended = now(again)["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (ended["exitCode"], ended["reason"]) == (137, "ContainerStatusUnknown")
        assert now(again)["status"]["phase"] == "Failed"
        assert now(again, "gated")["status"]["phase"] == "Pending"
        await again.kubelet.stop(0)

    run(tmp_path, story, keeper=ObjectFiles(tmp_path / "objects"))


MAIN = {"name": "a", "command": ["x"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"initContainers": [{"name": "first"}]}, "not supported yet: spec.initContainers"),
        ({"containers": [MAIN, {**MAIN, "name": "b"}]}, r"spec\.containers with 2 entries \(no sidecars\)"),
        ({"restartPolicy": "Always"}, "spec.restartPolicy Always, only Never is allowed"),
        ({"volumes": [{"name": "v", "nfs": {}}]}, r"spec\.volumes\[0\] \(v\) of kind nfs, allowed are configMap"),
        ({"containers": [{"name": "a"}]}, r"spec\.containers\[0\]\.command is needed"),
        ({"containers": [{**MAIN, "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]}, "no volume is named 'v'"),
        ({"containers": [{**MAIN, "livenessProbe": {"exec": {}}}]}, r"livenessProbe\.exec, only httpGet is allowed"),
        ({"containers": [{"name": "a", "command": ["x"], "lifecycle": {"preStop": {}}}]}, r"lifecycle\.preStop"),
    ],
)  # fmt: skip
def test_what_cannot_run_here_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    async def story(world: Embedded) -> None:
        with pytest.raises(Invalid, match=message):
            world.objects.create(pod(spec=change))

    run(tmp_path, story)
