"""Fixtures for all tests of the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

LONGEST = Path(__file__).with_name("test_layouts.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin a run with its longest file: as one of the last it would leave the other process without work."""
    items.sort(key=lambda item: item.path != LONGEST)


@pytest.fixture(autouse=True, scope="module")
def one_thread(threads_as_before: None) -> None:
    """Use one torch thread, as in the deterministic modes.

    The order of torch's sums depends on the number of threads, and threads that wait for each other are slow on a busy
    machine.
    """
    torch.set_num_threads(1)
