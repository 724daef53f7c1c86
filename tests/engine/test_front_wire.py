"""The core's wait for messages of fronts, and for what else wakes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.engine.core.front_wire import FrontWire

LONG_MS = 600_000


@pytest.mark.parametrize("woken", [0, 1])
def test_whatever_is_readable_ends_the_wait_without_a_message(tmp_path: Path, woken: int) -> None:
    """As letters of other engines do, and data ranks that ask for a step, where a core has both."""
    wire = FrontWire(f"ipc://{tmp_path}/core", lambda: 0.0)
    wire.open()
    descriptors = [os.eventfd(0), os.eventfd(0)]
    try:
        os.eventfd_write(descriptors[woken], 1)
        assert wire.wait(LONG_MS, *descriptors) is False
    finally:
        wire.close()
        for descriptor in descriptors:
            os.close(descriptor)
