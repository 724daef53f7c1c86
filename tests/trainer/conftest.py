"""Fixtures for all tests of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

FIRST = [Path(__file__).with_name(f"test_{name}.py") for name in ("layouts", "train_end_to_end", "zero_memory")]
"""Files of minutes that would be the longest, or among the last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin a run with long files: as one of the last such a file would leave the other processes without work."""
    items.sort(key=lambda item: FIRST.index(item.path) if item.path in FIRST else len(FIRST))


@pytest.fixture(autouse=True, scope="module")
def one_thread(threads_as_before: None) -> None:
    """Use one torch thread, as in the deterministic modes.

    The order of torch's sums depends on the number of threads, and threads that wait for each other are slow on a busy
    machine.
    """
    torch.set_num_threads(1)
