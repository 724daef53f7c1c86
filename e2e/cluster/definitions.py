"""Definitions of resources (CRDs): the wait until an API server serves them."""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES, PAUSE_S = 5, 1.0


def wait_until_established(kubectl: Callable[..., object], *named: str) -> None:
    """Wait for the definitions that `named` gives to kubectl: `-f FILE`, `crd/NAME`, `crd --all`.

    kubectl fails at once on a definition that has no status yet, so it is called again.

    Raises:
        Exception: that of the last call.
    """
    for left in reversed(range(TRIES)):
        try:
            kubectl("wait", "--for=condition=Established", "--timeout=60s", *named)
        except Exception:
            if not left:
                raise
            time.sleep(PAUSE_S)
        else:
            return
