"""Clusters for stories: each ends with its story, and must leave nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from testing.stories.alone import train_alone
from testing.stories.manifests import corpus, job
from testing.stories.story_cluster import StoryCluster

NewCluster = Callable[..., StoryCluster]
File = list[pytest.Item]
STORY_S = 1200
"""Limit of one story, above the limits of its waits."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give stories more time than other tests, and spread their files over the run."""
    files = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.path)]
    stories = [file for file in files if file[0].path.is_relative_to(Path(__file__).parent)]
    for item in itertools.chain(*stories):
        item.add_marker(pytest.mark.timeout(STORY_S))
    others = [file for file in files if file not in stories]
    items[:] = itertools.chain(*spread(stories, others))


def spread(few: Sequence[File], many: Sequence[File]) -> list[File]:
    """Return all of both in their order, the few at equal distances and none at the end.

    A story waits more than it computes: beside another file it costs little time, beside another story both wait.
    """
    distance = len(many) // (len(few) + 1)
    ends = [index * distance for index in range(1, len(few))]
    parts = [many[start:end] for start, end in zip([0, *ends], [*ends, len(many)], strict=True)]
    return [item for one, part in zip(few, parts, strict=True) for item in (one, *part)] if few else list(many)


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
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    return folder / "storage" / "checkpoints" / "taught"
