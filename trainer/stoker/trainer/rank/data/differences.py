"""What decides the samples of a corpus, and how two of them differ, in words for the user. Pure.

Called by `corpus`, which makes the facts, and by the loader, which finds those of a checkpoint in its cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]
"""`sources`: [name, weight, digest of contents and tokenizer] of each; `sequence_length`, `packing`, `held_out`."""

_FIELDS = {
    "sequence_length": "training.sequenceLength",
    "packing": "data.packing",
    "held_out": "data.validation.fraction",
}


def differences(before: Facts, now: Facts) -> list[str]:
    """Return a phrase for each field, and for each source, in which a corpus differs from that of a checkpoint."""
    fields = [
        f"{shown} was {_value(before.get(name))}, is {_value(now.get(name))}"
        for name, shown in _FIELDS.items()
        if before.get(name) != now.get(name)
    ]
    return fields + list(_of_sources(before.get("sources") or (), now["sources"]))


def _value(value: Any) -> str:
    return str(value).lower()  # as a manifest has true and false


def _of_sources(before: Sequence[Any], now: Sequence[Any]) -> Iterator[str]:
    old, new = ({name: (weight, digest) for name, weight, digest in sources} for sources in (before, now))
    for name, (weight, digest) in new.items():
        if name not in old:
            yield f"data.sources {name} is new"
            continue
        if old[name][0] != weight:
            yield f"data.sources {name} had weight {old[name][0]}, has {weight}"
        if old[name][1] != digest:
            yield f"data.sources {name} has other contents, or another format or tokenizer"
    yield from (f"data.sources {name} is missing" for name in old if name not in new)
    if old.keys() == new.keys() and list(old) != list(new):
        yield f"data.sources were in the order {', '.join(old)}, are in the order {', '.join(new)}"
