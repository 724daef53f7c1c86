"""What decides the samples of a corpus, and how two of them differ, in words for the user. Pure.

Called by `corpus`, which makes the facts, and by the loader, which finds those of a checkpoint in its cursor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Facts = Mapping[str, Any]
"""`sources`: [name, weight, digest of contents and tokenizer] of each; `sequence_length`, `packing`, `held_out`.

Since checkpoints have them: `tokenizer`, its fingerprint, and `contents`, name -> digest without the tokenizer.
"""

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
    return fields + _of_tokenizer(before, now) + list(_of_sources(before, now))


def _value(value: Any) -> str:
    return str(value).lower()  # as a manifest has true and false


def _of_tokenizer(before: Facts, now: Facts) -> list[str]:
    old, new = before.get("tokenizer"), now.get("tokenizer")
    if old is None or old == new:
        return []
    return [
        f"data.tokenizer is another: its fingerprint was {old}, is {new} (one of kind train follows its sources and "
        "vocabSize)"
    ]


def _of_sources(before: Facts, now: Facts) -> Iterator[str]:
    old, new = _sources(before), _sources(now)
    for name, (weight, digest) in new.items():
        if name not in old:
            yield f"data.sources {name} is new"
            continue
        if old[name][0] != weight:
            yield f"data.sources {name} had weight {old[name][0]}, has {weight}"
        if old[name][1] != digest:
            yield from _of_contents(name, before, now)
    yield from (f"data.sources {name} is missing" for name in old if name not in new)
    if old.keys() == new.keys() and list(old) != list(new):
        yield f"data.sources were in the order {', '.join(old)}, are in the order {', '.join(new)}"


def _sources(facts: Facts) -> dict[str, tuple[Any, Any]]:
    """Name -> weight and digest."""
    return {name: (weight, digest) for name, weight, digest in facts.get("sources") or ()}


def _of_contents(name: str, before: Facts, now: Facts) -> Iterator[str]:
    """Name a source whose tokens differ, unless they differ by the tokenizer alone."""
    old, new = (facts.get("contents") or {} for facts in (before, now))
    if name not in old:
        yield f"data.sources {name} has other contents, or another format or tokenizer"
    elif old[name] != new[name]:
        yield f"data.sources {name} has other contents, or another format"
