"""The work of the controller-manager's garbage collector, which does not run beside an API server alone."""

from __future__ import annotations

from e2e.api.world import World


async def collect_garbage(world: World) -> None:
    """Delete children whose owners are gone."""
    living = {found["metadata"]["uid"] for kind in ("TrainingJob", "Checkpoint") for found in await world.list(kind)}
    for kind in ("Pod", "Service", "ConfigMap"):
        for child in await world.list(kind):
            owners = {owner["uid"] for owner in child["metadata"].get("ownerReferences", ())}
            if owners and not owners & living:
                await world.api.delete(kind, world.namespace, child["metadata"]["name"])
