"""A canary under load: a revision that fails its gate is rolled back, the next one passes; no request fails."""

from __future__ import annotations

from pathlib import Path

from testing.stories.canary import is_rolled_back_then_promoted
from testing.stories.manifests import adopted, claim
from testing.stories.story_cluster import StoryCluster


def test_a_revision_that_fails_its_gate_is_rolled_back_and_the_next_one_replaces_the_old(
    cluster: StoryCluster, taught: Path
) -> None:
    older, newer = sorted(path.name for path in taught.glob("step-*"))
    cluster.apply(claim("archive", taught.parent), adopted("older", "archive", "taught", older))
    cluster.apply(adopted("newer", "archive", "taught", newer))
    is_rolled_back_then_promoted(cluster, "older", "newer", adopted("again", "archive", "taught", newer))
