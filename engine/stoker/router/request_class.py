"""Request classes: what a class promises, and the class of a request by header or by OpenAI's `service_tier`.

Part of the configuration; read by `Admission`. Bodies are not parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pydantic import Field

from stoker.pod.config_file import Config
from stoker.router.work import SEARCHED_BYTES

CLASS_HEADER = b"x-stoker-class"
"""On a request: the name of its class. On an answer: the class that it had."""
COMMON_TIERS = ("auto", "default")
"""Values of `service_tier` that name no class: the request is of the first one."""
_TIER = re.compile(rb'"service_tier"\s*:\s*(?:"([^"\\]{0,64})"|null)')


class RequestClass(Config):
    """One class. Classes are listed in their order: a request that waits goes before those of later classes."""

    name: str = Field(min_length=1)
    service_tiers: tuple[str, ...] = ()
    """Values of `service_tier` that stand for this class, beside its name."""
    ttft_goal_s: float | None = Field(default=None, gt=0)
    """A request goes to an engine while its first token is predicted within this time."""
    max_queued: int = Field(default=256, ge=0)
    """Requests that wait in one router."""
    max_queue_s: float = Field(default=0.0, ge=0)
    """How long a request waits; 0: it is refused at once."""
    late_class: str | None = None
    """The later class in which a request goes on that would miss the goal, in place of being refused."""
    aging_s: float | None = Field(default=None, gt=0)
    """After so long a request goes before all classes, whatever is predicted; None: half of `max_queue_s`."""

    @property
    def ages_after_s(self) -> float:
        """Time after which a request that waits goes before all classes."""
        return self.max_queue_s / 2 if self.aging_s is None else self.aging_s


def late_place(classes: Sequence[RequestClass], place: int) -> int | None:
    """Return the number of the class in which a late request of a class goes on; None: it is refused."""
    name = classes[place].late_class
    return next(number for number, one in enumerate(classes) if one.name == name) if name is not None else None


def late_problem(classes: Sequence[RequestClass]) -> str | None:
    """Say which `late_class` cannot be; None where all can."""
    for number, one in enumerate(classes):
        later = [other.name for other in classes[number + 1 :]]
        if one.late_class is not None and one.late_class not in later:
            allowed = ", ".join(later) or "none, because there is no later class"
            return f"late_class of {one.name}: {one.late_class!r} is no later class; allowed: {allowed}"
        if one.late_class is not None and one.ttft_goal_s is None:
            return f"late_class of {one.name} has no effect without ttft_goal_s"
    return None


class UnknownClass(ValueError):
    """A request names a class that there is not."""


def class_of(body: bytes, headers: Iterable[tuple[bytes, bytes]], classes: Sequence[RequestClass]) -> int:
    """Return the number of a request's class: by header, else by `service_tier`, else the first.

    The field is looked for at the begin and at the end of the body.

    Raises:
        UnknownClass: it names another one; the message has what is allowed.
    """
    named = next((value for key, value in headers if key == CLASS_HEADER), None)
    if named is not None:
        return _number(f"header {CLASS_HEADER.decode()}", named, [(one.name,) for one in classes], ())
    found = _TIER.search(body, 0, SEARCHED_BYTES) or _TIER.search(body, max(len(body) - SEARCHED_BYTES, 0))
    if found is None or found[1] is None:
        return 0
    return _number("service_tier", found[1], [(one.name, *one.service_tiers) for one in classes], COMMON_TIERS)


def _number(field: str, value: bytes, allowed: Sequence[Sequence[str]], first: Sequence[str]) -> int:
    text = value.decode(errors="replace")
    for number, names in enumerate(allowed):
        if text in names:
            return number
    if text in first:
        return 0
    shown = dict.fromkeys((*first, *(name for names in allowed for name in names)))
    raise UnknownClass(f"{field}: {text!r} is no class of this deployment; allowed: {', '.join(shown)}")
