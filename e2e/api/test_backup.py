"""What `stoker backup` prints brings a job back: its checkpoint is adopted, and the job goes on from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from e2e.api.fake_agents import SAVED_STEP
from e2e.api.training_story import CLAIM, begin, has_saved, trains
from e2e.api.world import World, eventually
from stoker.gateway.domain.backup import back_up


def test_another_cluster_adopts_the_checkpoints_and_goes_on(
    new_world: Callable[[], AbstractAsyncContextManager[World]],
) -> None:
    async def story() -> None:
        async with new_world() as old, old.operator():
            await begin(old)
            await eventually(lambda: trains(old), what="the job trains")
            await eventually(lambda: has_saved(old), what="its save is verified")
            kinds = ("TrainingJob", "Checkpoint", "InferenceDeployment")
            made = back_up(*[[{"kind": kind, **one} for one in await old.list(kind)] for kind in kinds])
        assert [found["kind"] for found in made.manifests] == ["Checkpoint", "TrainingJob"]
        async with new_world() as new, new.operator():
            new.kubelet.tasks = _verified
            await new.add(CLAIM)
            for manifest in made.manifests:
                await new.add(manifest)
            await eventually(lambda: _goes_on(new, made.manifests[0]), what="the job goes on from the checkpoint")

    asyncio.run(story())


def _verified(pod: dict[str, Any]) -> dict[str, Any]:
    """The result of a task that read the folder which its command names."""
    command = pod["spec"]["containers"][0]["command"]
    folder = command[command.index("--folder") + 1].rpartition("/")[2]
    digest = command[command.index("--digest") + 1]
    return {"task": "import", "folder": folder, "ok": True, "step": SAVED_STEP, "tokens": 9, "digest": digest,
            "bytes": 10, "files": 1, "pieces": 1, "problems": []}  # fmt: skip


async def _goes_on(world: World, checkpoint: dict[str, Any]) -> bool:
    """Whether the new job's pods got a configuration that begins at the old job's folder."""
    found = await world.status("Checkpoint", checkpoint["metadata"]["name"])
    if found.get("phase") != "Complete" or await world.phase("TrainingJob", "run") != "Running":
        return False
    config = next(one for one in await world.list("ConfigMap") if "config.json" in (one.get("data") or {}))
    start = json.loads(config["data"]["config.json"])["model_from"]
    assert checkpoint["spec"]["source"]["import"]["folder"] in json.dumps(start)
    assert checkpoint["spec"]["source"]["import"]["digest"] in json.dumps(start)
    return True
