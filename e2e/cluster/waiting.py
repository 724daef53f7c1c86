"""Waiting until a condition holds."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], *, timeout_s: float, every_s: float = 0.05) -> bool:
    """Evaluate `condition` every `every_s` seconds until it holds or the time is over; return whether it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True
