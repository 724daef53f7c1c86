"""Fixtures for all tests of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Use one torch thread, as in the deterministic modes.

    The order of torch's sums depends on the number of threads, and threads that wait for each other are slow on a busy
    machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
