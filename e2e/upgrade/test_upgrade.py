"""An upgrade from the previous release while a job trains and clients stream: nothing restarts, nothing fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from e2e.api.replica import eventually
from e2e.charts.helm import NAMESPACE
from e2e.charts.release import KubectlFailed
from e2e.processes.installation import PATIENCE_S, USER, Installation, installation
from e2e.upgrade.previous import ROOT, checkout
from testing.stories.load import Load
from testing.stories.manifests import claim, corpus, deployment, job, save_now

KINDS = ("trainingjobs", "checkpoints", "inferencedeployments", "enginepools")


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """Charts and sources of the previous release."""
    return checkout(tmp_path / "previous")


@pytest.fixture
def previous(tmp_path: Path, before: Path) -> Iterator[Installation]:
    """A cluster with the previous release."""
    with installation(tmp_path, before) as found:
        yield found


def containers(found: Installation) -> dict[str, tuple[str, str, int]]:
    """Return uid, process and restarts of each pod that runs."""
    running = [pod for pod in found.all("pods") if pod["status"].get("phase") == "Running"]
    states = {pod["metadata"]["name"]: (pod["metadata"]["uid"], *pod["status"]["containerStatuses"]) for pod in running}
    return {name: (uid, state["containerID"], state["restartCount"]) for name, (uid, state) in states.items()}


def revisions(found: Installation) -> dict[str, list[str]]:
    """Return the revisions of each pool."""
    return {
        pool["metadata"]["name"]: [one["name"] for one in pool["spec"]["revisions"]] for pool in found.all("enginepool")
    }


def generations(found: Installation) -> dict[str, int]:
    """Return the generation of each object that a user made."""
    listed = found.releases.get("trainingjobs,inferencedeployments", "--namespace", USER)["items"]
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["generation"] for item in listed}


def accepted(found: Installation) -> None:
    """Every stored object passes the definitions that are there now."""
    for kind in KINDS:
        names = [item["metadata"]["name"] for item in found.all(kind)]
        assert names, kind
        for name in names:
            eventually(partial(replaced, found, kind, name))


def replaced(found: Installation, kind: str, name: str) -> bool:
    """Send a stored object back as it is; False when its status changed meanwhile."""
    stored = json.dumps(found.one(kind, name))
    try:
        found.releases.kubectl("replace", "--dry-run=server", "-f", "-", stdin=stored)
    except KubectlFailed as failed:
        if "the object has been modified" in str(failed):
            return False
        raise
    return True


def begin(found: Installation) -> None:
    """A completed job, a job that trains and has saved, and a deployment of the first one's model."""
    found.apply(corpus(), *(claim(name) for name in ("checkpoints", "logs")))
    found.apply(job("base", {"training.totalSteps": 20}))
    found.wait("trainingjob", "base", "Completed")
    found.apply(job("train", {"training.totalSteps": 1_000_000, "checkpoint.intervalSteps": 1_000_000}))
    found.apply(deployment("teller", {"checkpointSelector": {"jobRef": {"name": "base"}}}))
    found.wait("trainingjob", "train", "Running")
    found.wait("inferencedeployment", "teller", "Serving")
    found.apply(save_now("before", "train"))
    found.is_ready("checkpoint", "before")


def upgrade(found: Installation) -> None:
    """Upgrade as the chart's rolling update does: the new operator is ready before the old one goes."""
    (old,) = found.replicas
    found.install(ROOT)
    new = found.operator("new", ROOT)
    eventually(new.is_ready, PATIENCE_S)
    assert old.leads()
    assert old.end() == 0
    eventually(new.leads, PATIENCE_S)


def test_an_upgrade_under_load_restarts_nothing_and_fails_no_request(previous: Installation, before: Path) -> None:
    eventually(previous.operator("old", before).leads, PATIENCE_S)
    begin(previous)
    pods, made, pools = containers(previous), generations(previous), revisions(previous)
    assert len(pods) == 3, "a trainer, an engine and a router"

    host, port = previous.router()
    with Load(f"http://{host}:{port}", "teller", lengths=(16, 160)) as load:
        eventually(lambda: len(load.answers) >= 4, PATIENCE_S)
        upgrade(previous)
        taken_over = len(load.answers)
        previous.apply(save_now("after", "train"))
        previous.is_ready("checkpoint", "after")
        eventually(lambda: len(load.answers) >= taken_over + 4 or bool(load.failures), PATIENCE_S)
    assert load.failures == []
    assert len(load.fingerprints) == 1

    accepted(previous)
    assert containers(previous) == pods
    assert (generations(previous), revisions(previous)) == (made, pools)
    assert previous.one("trainingjob", "train")["status"]["attempt"]["number"] == 0
    assert previous.one("inferencedeployment", "teller")["status"]["phase"] == "Serving"
    assert "Traceback" not in previous.replicas[-1].text
    leases = previous.releases.get("lease", "--namespace", NAMESPACE)["items"]
    assert [found["spec"]["holderIdentity"] for found in leases] == ["new"]
