"""kubectl as its users run it: columns, wait, scale, explain, diff, selectors, and conditions for other tools."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e.api.api_client import Object
from e2e.api.plane import KubectlFailed, Plane
from e2e.api.training_story import CLAIM, begin, finish, to_the_end, trains
from e2e.api.world import Story, World, eventually, job
from e2e.cluster import binaries
from stoker.operator.api.crd import KIND_INFOS, KindInfo
from testing.operator.bad_manifests import DEPLOYMENT, GOOD, changed


def cell(plane: Plane, *given: str) -> list[dict[str, str]]:
    """Parse the table of `kubectl get` into rows by column; the header's words mark where cells begin."""
    header, *lines = plane.kubectl("get", *given).splitlines()
    starts = [i for i, c in enumerate(header) if c != " " and (i == 0 or header[i - 2 : i] == "  ")]
    names = [header[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
    rows = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]
    return [dict(zip(names, row, strict=True)) for row in rows]


async def kubectl(world: World, *given: str, **options: Any) -> str:
    return await asyncio.to_thread(world.plane.kubectl, "-n", world.namespace, *given, **options)


async def rows(world: World, *given: str) -> list[dict[str, str]]:
    return await asyncio.to_thread(cell, world.plane, "-n", world.namespace, *given)


@pytest.mark.parametrize("info", [pytest.param(info, id=info.kind) for info in KIND_INFOS])
def test_get_shows_the_columns_of_the_kind(plane: Plane, namespace: str, info: KindInfo) -> None:
    manifest = changed(GOOD[info.kind], {"metadata.namespace": namespace})
    plane.kubectl("create", "-f", "-", stdin=manifest)
    short = cell(plane, info.short_name, "-n", namespace)
    wide = cell(plane, info.plural, "-n", namespace, "-o", "wide")
    assert list(short[0]) == ["NAME", *(column.name.upper() for column in info.columns if not column.wide)]
    assert list(wide[0]) == ["NAME", *(column.name.upper() for column in info.columns)]
    assert [row["NAME"] for row in short] == ["x"]
    assert "x" in plane.kubectl("get", "stoker", "-n", namespace)


def test_the_plugin_answers_below_kubectl(plane: Plane, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = str(Path(sys.executable).parent)
    assert (Path(programs) / "kubectl-stoker").exists()
    monkeypatch.setenv("PATH", programs, prepend=":")
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig))
    plane.kubectl("create", "-f", "-", stdin=changed(GOOD["TrainingJob"], {"metadata.namespace": namespace}))
    program = str(binaries.bin_folder() / "kubectl")
    command = [program, "stoker", "get", "tj", "-n", namespace, "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert [found["metadata"]["name"] for found in json.loads(answer.stdout)["items"]] == ["x"]


@pytest.mark.parametrize(
    ("path", "texts"),
    [
        ("tj.spec.training.globalBatchSize", ["<integer>"]),
        ("tj.spec.parallelism", ["tensor", "pipeline", "<integer>"]),
        ("ckpt.spec.deletionPolicy", ["ENUM:", "Retain", "Delete"]),
        ("infd.spec.pools.autoscaling.mode", ["ENUM:", "slo", "external"]),
        ("epool.spec.replicas", ["<integer>"]),
    ],
)
def test_explain_knows_every_field(plane: Plane, path: str, texts: list[str]) -> None:
    explained = plane.kubectl("explain", path)
    assert all(text in explained for text in texts), explained
    assert "DESCRIPTION" in explained


def test_a_wrong_field_is_named_before_anything_is_stored(plane: Plane, namespace: str) -> None:
    manifest = changed(GOOD["TrainingJob"], {"metadata.namespace": namespace, "spec.trainning": {}})
    with pytest.raises(KubectlFailed, match=r'unknown field "spec\.trainning"'):
        plane.kubectl("apply", "-f", "-", stdin=manifest)
    assert plane.kubectl("get", "tj", "-n", namespace, "-o", "name") == ""


@pytest.mark.parametrize("kind", GOOD)
def test_what_was_applied_shows_no_difference(plane: Plane, namespace: str, kind: str) -> None:
    """Defaults are in the schema, so a GitOps tool sees no drift.

    The copy that client-side apply keeps is far below its limit of 256 KiB.
    """
    manifest = changed(GOOD[kind], {"metadata.namespace": namespace})
    plane.kubectl("apply", "-f", "-", stdin=manifest)
    plane.kubectl("diff", "-f", "-", stdin=manifest)
    stored = json.loads(plane.kubectl("get", kind, "x", "-n", namespace, "-o", "json"))
    assert len(stored["metadata"]["annotations"]["kubectl.kubernetes.io/last-applied-configuration"]) < 20_000
    other = changed(manifest, {"metadata.name": "y"})
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=other)
    plane.kubectl("diff", "--server-side", "-f", "-", stdin=other)


def test_jobs_are_selected_by_field(plane: Plane, namespace: str) -> None:
    for name, suspended in (("one", True), ("two", False)):
        body = job(name, run__suspend=suspended)
        plane.kubectl("create", "-f", "-", stdin=changed(body, {"metadata.namespace": namespace}))
    found = plane.kubectl("get", "tj", "-n", namespace, "--field-selector", "spec.run.suspend=true", "-o", "name")
    assert found.split() == ["trainingjob.stoker.dev/one"]


def test_a_job_tells_its_story_in_columns_and_ends_a_wait(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator():
            waiting = asyncio.create_task(
                kubectl(
                    world, "wait", "--for=condition=Ready", "--for=create", "tj/run", "--timeout=240s", timeout_s=300
                )
            )
            world.kubelet.runs = lambda pod: False
            await begin(world)
            await eventually(lambda: shows(world, PHASE="Pending"), what="the job waits for its pods")
            assert (await rows(world, "tj"))[0]["MESSAGE"].startswith("2 of 2 pods wait")
            world.kubelet.runs = lambda pod: True
            await world.kubelet.look_again()
            await to_the_end(world)
            await eventually(lambda: shows(world, PHASE="Completed", VERIFIED="50", OF="100", RESTARTS="0"))
            await waiting
            (saved,) = await rows(world, "ckpt")
            assert {name: saved[name] for name in ("PHASE", "STEP", "READY", "VERIFIED", "JOB")} == {
                "PHASE": "Complete",
                "STEP": "50",
                "READY": "True",
                "VERIFIED": "True",
                "JOB": "run",
            }

    run(story)


async def shows(world: World, **cells: str) -> bool:
    found = await rows(world, "tj")
    return bool(found) and {name: found[0][name] for name in cells} == cells


def test_kstatus_reads_every_stage_of_a_job(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator():
            stages = [kstatus(await world.add(job()))]
            await eventually(lambda: is_seen(world), what="the operator has seen the job")
            stages.append(kstatus(await world.get("TrainingJob", "run")))
            await world.add(CLAIM)
            await eventually(lambda: trains(world), what="the job trains")
            stages.append(kstatus(await world.get("TrainingJob", "run")))
            await finish(world)
            await eventually(lambda: is_over(world), what="the job is over")
            stages.append(kstatus(await world.get("TrainingJob", "run")))
            await world.add(job("refused", runtime__kernels="reference", runtime__attention="cudnn"))
            await eventually(lambda: is_seen(world, "refused"), what="the operator has seen the other job")
            stages.append(kstatus(await world.get("TrainingJob", "refused")))
            assert stages == ["InProgress", "InProgress", "InProgress", "Current", "Failed"]

    run(story)


async def is_seen(world: World, name: str = "run") -> bool:
    found = await world.get("TrainingJob", name)
    return bool((found.get("status") or {}).get("observedGeneration") == found["metadata"]["generation"])


async def is_over(world: World) -> bool:
    return await world.phase("TrainingJob", "run") == "Completed"


def kstatus(found: Object) -> str:
    """Return the status that kstatus (kubectl, Flux, Argo CD) derives from an object of an unfamiliar kind.

    A status without observedGeneration and conditions counts as Current there. The operator writes both at its first
    pass, so that a tool that waits reads Ready as well.
    """
    status = found.get("status") or {}
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", ())}
    if found["metadata"].get("deletionTimestamp"):
        return "Terminating"
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    if conditions.get("Reconciling") == "True" or conditions.get("Ready") != "True":
        return "InProgress"
    return "Current"


def deployment(replicas: int = 1, **autoscaling: Any) -> Object:
    pool = {"name": "main", "replicas": replicas, **({"autoscaling": autoscaling} if autoscaling else {})}
    return changed(
        DEPLOYMENT, {"metadata.name": "chat", "spec.model": {"uri": "pvc://models/tiny"}, "spec.pools": [pool]}
    )


async def serves(world: World, ready: str) -> bool:
    status = await world.status("InferenceDeployment", "chat")
    return (status.get("phase"), status.get("ready")) == ("Serving", ready)


def test_scale_changes_a_pool_that_is_scaled_from_outside(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator() as running:
            await world.add(changed(CLAIM, {"metadata.name": "models"}))
            await world.add(deployment(max=5, mode="external"))
            await eventually(lambda: serves(world, "1/1"), what="one engine serves")
            (pool,) = await world.list("EnginePool")
            name = pool["metadata"]["name"]
            await kubectl(world, "scale", "epool", name, "--replicas=3", "--current-replicas=1")
            await eventually(lambda: serves(world, "3/3"), what="three engines serve")
            await kubectl(world, "wait", "--for=condition=Ready", "infd/chat", f"epool/{name}", "--timeout=200s")
            path = f"/apis/stoker.dev/v1alpha1/namespaces/{world.namespace}/enginepools/{name}/scale"
            scale = json.loads(await kubectl(world, "get", "--raw", path))
            assert (scale["spec"], scale["status"]["replicas"]) == ({"replicas": 3}, 3)
            chosen = await kubectl(world, "get", "pods", "-l", scale["status"]["selector"], "-o", "name")
            assert len(chosen.split()) == 3
            await kubectl(world, "scale", "epool", name, "--replicas=1")
            await eventually(lambda: serves(world, "1/1"), what="one engine serves again")
            await running.rest()
            running.proxy.clear()
            await running.look_again()
            assert running.proxy.quiet_calls() == []

    run(story)


def test_without_a_scaler_the_deployment_says_how_many(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator():
            await world.add(changed(CLAIM, {"metadata.name": "models"}))
            await world.add(deployment(replicas=2))
            await eventually(lambda: serves(world, "2/2"), what="two engines serve")
            (pool,) = await world.list("EnginePool")
            await kubectl(world, "scale", "epool", pool["metadata"]["name"], "--replicas=1")

            async def restored() -> bool:
                (again,) = await world.list("EnginePool")
                return bool(again["spec"]["replicas"] == 2 and again["metadata"]["generation"] >= 3)

            await eventually(restored, what="the deployment's number is back")
            await eventually(lambda: serves(world, "2/2"), what="two engines serve again")

    run(story)


def test_a_pool_by_itself_can_be_scaled_and_a_job_cannot(plane: Plane, namespace: str) -> None:
    for kind in ("EnginePool", "TrainingJob"):
        plane.kubectl("create", "-f", "-", stdin=changed(GOOD[kind], {"metadata.namespace": namespace}))
    plane.kubectl("scale", "epool/x", "--replicas=7", "-n", namespace)
    assert cell(plane, "epool", "-n", namespace)[0]["DESIRED"] == "7"
    with pytest.raises(KubectlFailed, match="NotFound"):
        plane.kubectl("scale", "tj/x", "--replicas=7", "-n", namespace)
