"""Writes that must reach the object store: repeated while the state folder cannot be written.

Called by the pods' tasks, the kubelet and the Services.
"""

from __future__ import annotations

from collections.abc import Callable

from stoker.operator.cluster.interface import Conflict, NotFound
from stoker.operator.cluster.local.object_storage import StateFolderError
from stoker.operator.domain.clock import Clock

RETRY_S = 1.0


async def until_stored(write: Callable[[], object], clock: Clock, *, give_up: Callable[[], bool]) -> bool:
    """Repeat `write` once a second until it succeeds; False when `give_up` returns true.

    An object that is gone, or another one of the same name, ends it too: nothing is left to write.
    """
    while not try_store(write):
        if give_up():
            return False
        await clock.sleep(RETRY_S)
    return True


def try_store(write: Callable[[], object]) -> bool:
    """Write once; False when the state folder cannot be written."""
    try:
        write()
    except StateFolderError:
        return False
    except (NotFound, Conflict):
        return True
    return True
