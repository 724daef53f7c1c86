"""The story of a pool that grows under a trace, shrinks when it ends, goes to zero, and is woken by the trace again."""

from __future__ import annotations

from testing.clocked.trace import TracedRequest
from testing.stories.object_views import Object
from testing.stories.served_examples import autoscaled
from testing.stories.stage import Stage
from testing.stories.traced_load import TracedLoad

NAME = "chat"
TRACE = [TracedRequest(number, 3.0 * (number // 6), 8 + number % 5, 120) for number in range(24)]
"""Groups of six requests every three seconds, as the public conversation trace has them."""


def grows_goes_to_zero_and_wakes(stage: Stage, checkpoint: str) -> None:
    """Tell the story of `examples/serve-autoscaled` with a verified checkpoint.

    It may go to zero only once it has grown: if it did so before the first request, going down from two would be the
    second turn within ten minutes, for which a pool waits.
    """
    stage.apply(autoscaled(checkpoint, least=1))
    stage.wait_for_phase("InferenceDeployment", NAME, "Serving")
    url = stage.ready_url(NAME)

    with TracedLoad(url, NAME, TRACE) as load:
        stage.wait("InferenceDeployment", NAME, lambda found: ready(found) == 2, "grown")
    assert load.failures == []
    assert load.answers
    grown = next(found for found in decisions(stage) if found["after"] == 2)
    assert (grown["before"], grown["reason"] in ("Load", "Missed")) == (1, True)
    assert float(grown["inputs"]["requestsPerSecond"]) > 0

    stage.apply(autoscaled(checkpoint, least=0))
    stage.wait_for_phase("InferenceDeployment", NAME, "ScaledToZero")
    assert [found["after"] for found in decisions(stage)][-2:] == [1, 0]
    stage.wait_until(lambda: not stage.pods(role="engine"), "no engine left")

    with TracedLoad(url, NAME, TRACE) as again:
        stage.wait_until(lambda: again.answers or again.failures, "an answer to a held request")
    assert again.failures == []
    assert "Wake" in [found["reason"] for found in decisions(stage)]
    assert stage.wait_for_event("InferenceDeployment", NAME, "Wake")
    stage.delete("InferenceDeployment", NAME)


def decisions(stage: Stage) -> list[Object]:
    """The changes of the pool so far; what kept it from one is left out."""
    (pool,) = stage.status("InferenceDeployment", NAME)["pools"]
    return [found for found in pool["decisions"] if found["before"] != found["after"]]


def ready(found: Object) -> int:
    pools = (found.get("status") or {}).get("pools") or [{}]
    return int(pools[0].get("ready") or 0)
