"""The costs of an engine by the formulas of `stoker.router.pairs`, one at a time: the slow twin of `prompt_costs`
and of the prices in a `Standing`."""

from __future__ import annotations

from stoker.router.pairs import Place
from stoker.router.snapshot import Role
from stoker.router.standing import AGAINST_ROLE_S, Measured


def whole_s(place: Place, seen: Measured, uncached: int) -> float:
    """The cost of a request that one engine serves alone."""
    return seen.prefill_s(uncached) + decode_s(seen) + against(place, "prefill")


def decode_s(seen: Measured) -> float:
    """What the requests that are there already cost the answer."""
    return seen.pending * seen.gap_s


def against(place: Place, other: Role) -> float:
    """The price of work that is the other role's."""
    return AGAINST_ROLE_S if place.role == other else 0.0
