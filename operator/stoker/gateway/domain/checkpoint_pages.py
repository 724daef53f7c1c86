"""Pages of the checkpoints of a job: the order, and the place behind which the next page begins. Pure.

A place is `STEP.NAME` of the last checkpoint of a page. It stays where it is when checkpoints are saved or deleted
between two pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Object = dict[str, Any]
PLACE = r"^([0-9]{1,18}\.[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"
MAX_PLACE = 18 + 1 + 253


def order_of(checkpoint: Object) -> tuple[int, str]:
    """The larger, the newer. A save that is not complete has no step yet and comes last."""
    return int((checkpoint.get("status") or {}).get("step") or 0), str(checkpoint["metadata"]["name"])


def place_of(checkpoint: Object) -> str:
    """The place behind a checkpoint."""
    step, name = order_of(checkpoint)
    return f"{step}.{name}"


def behind(newest_first: Sequence[Object], place: str) -> list[Object]:
    """The checkpoints behind a place that fits `PLACE`; all for an empty one."""
    if not place:
        return list(newest_first)
    step, _, name = place.partition(".")
    return [one for one in newest_first if order_of(one) < (int(step), name)]
