"""Clusters for stories: each ends with its story, and must leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.stories.story_cluster import StoryCluster

NewCluster = Callable[..., StoryCluster]


@pytest.fixture
def new_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewCluster]:
    """Starts clusters; after the story each is ended, and no process and no socket of it may be left."""
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
