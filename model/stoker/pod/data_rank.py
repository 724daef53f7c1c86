"""The header by which a router names the data rank of an engine that is to answer a request. Values only.

Ranks are numbered as in the engine's reports of load: from 0, in each pod by itself.
"""

from __future__ import annotations

RANK_HEADER = b"x-stoker-data-rank"
"""The number of the rank. Only a router sets it: routers drop a client's."""
MAX_DIGITS = 4


def rank_in(value: bytes, num_ranks: int) -> int | None:
    """Read the header's value; None where it is absent (empty).

    Raises:
        ValueError: it is no rank of this engine, with what is allowed.
    """
    if not value:
        return None
    if len(value) > MAX_DIGITS or not value.isdigit() or int(value) >= num_ranks:
        name, shown = RANK_HEADER.decode(), value[:64].decode("latin-1")
        allowed = "only rank 0 is" if num_ranks == 1 else f"a rank's number from 0 to {num_ranks - 1} is"
        raise ValueError(f"header {name}: {allowed} allowed, got {shown!r}")
    return int(value)
