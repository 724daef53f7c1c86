"""kubectl, Helm and GitOps controllers beside the operator: none reverts the fields of another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from e2e.api.api_client import ApiRefused, Object
from e2e.api.conftest import CRDS
from e2e.api.plane import KubectlFailed, Plane
from e2e.api.training_story import CLAIM, assert_at_rest, begin, has_saved, to_the_end, trains
from e2e.api.world import Running, Story, World, eventually, job
from testing.operator.bad_manifests import DEPLOYMENT, GOOD, changed

OURS = "stoker-operator"
GITOPS = {
    "app.kubernetes.io/instance": "training",
    "app.kubernetes.io/managed-by": "Helm",
    "argocd.argoproj.io/instance": "training",
    "kustomize.toolkit.fluxcd.io/name": "training",
    "helm.toolkit.fluxcd.io/name": "training",
}
"""Labels by which these tools recognise their objects; a child that carries one would be adopted, and pruned."""
TOOLS = ("helm", "kustomize-controller", "argocd-controller")


async def kubectl(world: World, *given: str, **options: Any) -> str:
    return await asyncio.to_thread(world.plane.kubectl, "-n", world.namespace, *given, **options)


def in_namespace(world: World, manifest: Object) -> Object:
    return changed(manifest, {"metadata.namespace": world.namespace})


def managers(found: Object, subresource: str = "") -> set[str]:
    """Return the field managers of an object, or of its status."""
    entries = found["metadata"]["managedFields"]
    return {entry["manager"] for entry in entries if entry.get("subresource", "") == subresource}


def test_the_operator_owns_the_status_and_nothing_else_of_what_a_user_made(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator():
            await begin(world)
            await to_the_end(world)
            found = await world.get("TrainingJob", "run")
            assert managers(found, "status") == {OURS}
            assert OURS not in managers(found)

    run(story)


def test_applying_again_with_kubectl_meets_no_conflict_and_changes_nothing(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator() as running:
            await world.add(CLAIM)
            manifest = in_namespace(world, job())
            await kubectl(world, "apply", "--server-side", "-f", "-", stdin=manifest)
            await eventually(lambda: trains(world), what="the job trains")
            await eventually(lambda: has_saved(world), what="its save is verified")
            await running.rest()
            before = await world.get("TrainingJob", "run")
            for side in (["--server-side"], ["--server-side", "--field-manager=ci"]):
                await kubectl(world, "apply", *side, "-f", "-", stdin=manifest)
            after = await world.get("TrainingJob", "run")
            assert (after["spec"], after["status"]) == (before["spec"], before["status"])
            assert after["metadata"]["generation"] == 1
            await assert_at_rest(running)

    run(story)


def test_kubectl_apply_changes_what_may_change_while_the_job_runs(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        async with world.operator() as running:
            await world.add(CLAIM)
            manifest = in_namespace(world, job())
            await kubectl(world, "apply", "-f", "-", stdin=manifest)
            await eventually(lambda: trains(world), what="the job trains")
            await running.rest()
            await kubectl(world, "apply", "-f", "-", stdin=changed(manifest, {"spec.checkpoint.maxToKeep": 2}))

            async def taken() -> bool:
                return bool((await world.status("TrainingJob", "run"))["observedGeneration"] == 2)

            await eventually(taken, what="the operator has seen the change")
            assert len(world.kubelet.created) == 2
            await assert_at_rest(running)

    run(story)


def test_helm_and_gitops_controllers_may_own_the_same_job(run: Callable[[Story], None]) -> None:
    """Each tool applies its whole manifest repeatedly and by force; the operator has nothing to change."""

    async def story(world: World) -> None:
        async with world.operator() as running:
            await world.add(CLAIM)
            manifest = in_namespace(world, changed(job(), {"metadata.labels": GITOPS}))
            await world.api.apply(manifest, "helm")
            await eventually(lambda: trains(world), what="the job trains")
            await eventually(lambda: has_saved(world), what="its save is verified")
            await running.rest()
            running.proxy.clear()
            for tool in TOOLS * 3:
                await world.api.apply(manifest, tool, force=True)
            await running.rest()
            assert running.proxy.quiet_calls() == []
            found = await world.get("TrainingJob", "run")
            assert found["metadata"]["generation"] == 1
            assert managers(found) == set(TOOLS)
            await assert_children_are_not_adopted(world)
            await assert_at_rest(running)

    run(story)


async def assert_children_are_not_adopted(world: World) -> None:
    children = [child for kind in ("Pod", "Service", "ConfigMap", "Checkpoint") for child in await world.list(kind)]
    labels = [child["metadata"].get("labels", {}) for child in children]
    assert len(labels) >= 6
    assert not any(set(found) & (set(GITOPS) - {"app.kubernetes.io/managed-by"}) for found in labels)
    assert all(
        found["app.kubernetes.io/managed-by"] == OURS for found in labels if "app.kubernetes.io/managed-by" in found
    )


def test_two_tools_that_disagree_are_told_so(run: Callable[[Story], None]) -> None:
    async def story(world: World) -> None:
        await world.api.apply(in_namespace(world, job()), "helm")
        with pytest.raises(ApiRefused, match='conflict with "helm"'):
            await world.api.apply(in_namespace(world, job(workers__replicas=4)), "kustomize-controller")

    run(story)


def test_a_section_that_is_applied_no_more_goes_with_its_defaults(run: Callable[[Story], None]) -> None:
    """As in the embedded cluster (`tests/operator/test_admission_updates.py`)."""

    async def story(world: World) -> None:
        canary = {"type": "canary", "canary": {"steps": [{"percent": 5}]}}
        plain = in_namespace(world, DEPLOYMENT)
        await world.api.apply(changed(plain, {"spec.rollout": canary}), "helm")
        found = await world.api.apply(changed(plain, {"spec.rollout": {"type": "rolling"}}), "helm")
        assert "canary" not in found["spec"]["rollout"]

    run(story)


def test_what_others_add_to_our_children_stays(run: Callable[[Story], None]) -> None:
    """A mesh annotates a Service, a policy tool labels pods, an HPA owns `/scale`: no pass takes any of it back."""

    async def story(world: World) -> None:
        async with world.operator() as running:
            await serve(world, running)
            theirs = {
                "metadata": {
                    "annotations": {"mesh.example/inject": "true"},
                    "labels": {"policy.example/checked": "yes"},
                }
            }
            for kind in ("Pod", "Service", "ConfigMap", "EnginePool"):
                for child in await world.list(kind):
                    await world.api.patch(kind, world.namespace, child["metadata"]["name"], theirs)
            await running.rest()
            await assert_at_rest(running)
            await world.api.patch("InferenceDeployment", world.namespace, "chat", {"spec": {"router": {"replicas": 2}}})
            await eventually(lambda: is_serving(world, "3/3"), what="it serves again")
            await running.rest()
            for kind in ("Service", "EnginePool"):
                for child in await world.list(kind):
                    assert child["metadata"]["annotations"]["mesh.example/inject"] == "true"
                    assert child["metadata"]["labels"]["policy.example/checked"] == "yes"

    run(story)


async def serve(world: World, running: Running) -> None:
    """Start a deployment whose pool an HPA has scaled to three."""
    await world.add(changed(CLAIM, {"metadata.name": "models"}))
    pools = [{"name": "main", "autoscaling": {"max": 5, "mode": "external"}}]
    await world.add(
        changed(DEPLOYMENT, {"metadata.name": "chat", "spec.model": {"uri": "pvc://models/tiny"}, "spec.pools": pools})
    )
    await eventually(lambda: is_serving(world, "1/1"), what="one engine serves")
    (pool,) = await world.list("EnginePool")
    scale = f"apis/stoker.dev/v1alpha1/namespaces/{world.namespace}/enginepools/{pool['metadata']['name']}/scale"
    query = {"fieldManager": "horizontal-pod-autoscaler"}
    await world.api.ask("PATCH", scale, {"spec": {"replicas": 3}}, query=query, kind="merge-patch+json")
    await eventually(lambda: is_serving(world, "3/3"), what="three engines serve")
    await running.rest()


async def is_serving(world: World, ready: str) -> bool:
    status = await world.status("InferenceDeployment", "chat")
    return (status.get("phase"), status.get("ready")) == ("Serving", ready)


@pytest.mark.parametrize("kind", ["TrainingJob", "EnginePool"])
def test_a_changed_definition_keeps_what_is_stored(plane: Plane, namespace: str, kind: str) -> None:
    """A later version adds a field and a column: objects stay as they are, also when the definition goes back."""
    plane.kubectl("create", "-f", "-", stdin=changed(GOOD[kind], {"metadata.namespace": namespace}))
    file = CRDS / f"stoker.dev_{kind.lower()}s.yaml"
    definition = yaml.safe_load(file.read_text())
    before = stored(plane, namespace, kind)
    version = definition["spec"]["versions"][0]
    version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["fromTheFuture"] = {"type": "string"}
    version["additionalPrinterColumns"].append({"name": "New", "type": "string", "jsonPath": ".spec.fromTheFuture"})
    plane.kubectl("apply", "--server-side", "-f", "-", stdin=definition)
    eventually_explained(plane, f"{kind}.spec.fromTheFuture")
    assert stored(plane, namespace, kind) == before
    plane.kubectl("apply", "--server-side", "-f", str(file))
    assert stored(plane, namespace, kind) == before


def stored(plane: Plane, namespace: str, kind: str) -> Object:
    found: Object = json.loads(plane.kubectl("get", kind, "x", "-n", namespace, "-o", "json"))
    return found


def eventually_explained(plane: Plane, path: str) -> None:
    """Wait until the API server serves the new schema, a moment after it accepted it."""

    async def explained() -> bool:
        try:
            return "fromTheFuture" in await asyncio.to_thread(plane.kubectl, "explain", path)
        except KubectlFailed:
            return False

    asyncio.run(eventually(explained, what=path))
