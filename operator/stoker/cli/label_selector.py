"""Label selectors in kubectl's notation: `team=a,tier!=test,zone in (x, y),gpu,!spot`. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_./]*[A-Za-z0-9])?"
_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_PARTS = re.compile(r",(?![^(]*\))")
_SET = re.compile(rf"({_NAME})\s+(in|notin)\s*\(([^()]*)\)")
_EQUALITY = re.compile(rf"({_NAME})\s*(==|=|!=)\s*({_VALUE})")
_PRESENCE = re.compile(rf"(!?)\s*({_NAME})")
FORMS = "NAME=VALUE, NAME!=VALUE, NAME in (A,B), NAME notin (A,B), NAME and !NAME, separated by commas"


@dataclass(frozen=True)
class Requirement:
    """What one label must be."""

    name: str
    sign: str
    """`in`, `notin`, `exists` or `absent`."""
    values: frozenset[str] = frozenset()

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether the labels of an object meet it. As in Kubernetes, an absent label is `notin` every set."""
        return _SIGNS[self.sign](labels.get(self.name), self.values)


_SIGNS: Mapping[str, Callable[[str | None, frozenset[str]], bool]] = {
    "in": lambda value, values: value in values,
    "notin": lambda value, values: value not in values,
    "exists": lambda value, _: value is not None,
    "absent": lambda value, _: value is None,
}


@dataclass(frozen=True)
class LabelSelector:
    """Requirements that must all hold; none is met by every object."""

    requirements: tuple[Requirement, ...] = ()

    def matches(self, found: Mapping[str, Any]) -> bool:
        """Whether an object is selected."""
        labels = found["metadata"].get("labels") or {}
        return all(one.holds(labels) for one in self.requirements)

    @property
    def equalities(self) -> dict[str, str]:
        """The labels that must have one value: every cluster can select by these itself."""
        return {one.name: min(one.values) for one in self.requirements if one.sign == "in" and len(one.values) == 1}


def parse_selector(text: str | None) -> LabelSelector:
    """Parse a selector; None is one that selects everything.

    Raises:
        ValueError: naming the part that is wrong, and the forms that are allowed.
    """
    if text is None:
        return LabelSelector()
    return LabelSelector(tuple(_requirement(part.strip()) for part in _PARTS.split(text)))


def _requirement(part: str) -> Requirement:
    if found := _SET.fullmatch(part):
        values = frozenset(value.strip() for value in found[3].split(","))
        if all(re.fullmatch(_VALUE, value) for value in values):
            return Requirement(found[1], found[2], values)
    elif found := _EQUALITY.fullmatch(part):
        return Requirement(found[1], "notin" if found[2] == "!=" else "in", frozenset({found[3]}))
    elif found := _PRESENCE.fullmatch(part):
        return Requirement(found[2], "absent" if found[1] else "exists")
    raise ValueError(f"selector: {part!r} is none of {FORMS}")
