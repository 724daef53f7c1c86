"""The example of a scaled pool: it grows under a trace, shrinks behind it, goes to zero, and wakes for it again."""

from __future__ import annotations

from pathlib import Path

from testing.stories.autoscaling import grows_goes_to_zero_and_wakes
from testing.stories.manifests import adopted, claim
from testing.stories.story_cluster import StoryCluster


def test_a_pool_grows_under_a_trace_goes_to_zero_and_wakes_for_a_held_request(
    cluster: StoryCluster, taught: Path
) -> None:
    newest = max(path.name for path in taught.glob("step-*"))
    cluster.apply(claim("archive", taught.parent), adopted("newer", "archive", "taught", newest))
    grows_goes_to_zero_and_wakes(cluster, "newer")
