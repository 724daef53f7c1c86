"""Clusters for stories: each ends with its story, and must leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testing.stories.alone import train_alone
from testing.stories.manifests import corpus, job
from testing.stories.story_cluster import StoryCluster

NewCluster = Callable[..., StoryCluster]
STORY_S = 1200
"""Limit of one story, above the limits of its waits."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give stories more time than other tests."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(STORY_S))


@pytest.fixture
def new_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewCluster]:
    """A function that starts clusters.

    After the story each is ended, and no process or socket of it may be left.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started: list[StoryCluster] = []

    def start(name: str = "state", addresses: str = "loopback") -> StoryCluster:
        found = StoryCluster(tmp_path / name, addresses)
        started.append(found)
        found.start()
        return found

    yield start
    for found in started:
        found.end()
        assert found.remains() == []


@pytest.fixture
def cluster(new_cluster: NewCluster) -> StoryCluster:
    return new_cluster()


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two saves of a finished run, made without an operator."""
    folder = tmp_path_factory.mktemp("taught")
    steps = {"training.totalSteps": 40, "checkpoint.intervalSteps": 20}
    with train_alone(folder, corpus(), job("taught", steps)) as run:
        output, _ = run.communicate(timeout=120)
    assert run.returncode == 0, output
    return folder / "storage" / "checkpoints" / "taught"
