"""Print objects for people: the columns of `get`, one line of progress, the page of `describe`. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from stoker.cli.event_time import time_of
from stoker.cli.text_style import aligned

Object = Mapping[str, Any]
Column = tuple[str, str]

COLUMNS: dict[str, tuple[Column, ...]] = {
    "TrainingJob": (
        ("PHASE", "status.phase"),
        ("STEP", "status.progress.step"),
        ("OF", "status.progress.totalSteps"),
        ("LOSS", "status.progress.loss"),
        ("VERIFIED", "status.newestVerifiedCheckpoint.step"),
        ("RESTARTS", "status.restarts"),
    ),
    "Checkpoint": (
        ("PHASE", "status.phase"),
        ("STEP", "status.step"),
        ("LOSS", "status.loss"),
        ("VERIFIED", "status.conditions[Verified]"),
        ("IN USE", "status.conditions[InUse]"),
        ("BYTES", "status.bytes"),
        ("JOB", "status.job.name"),
    ),
    "InferenceDeployment": (
        ("PHASE", "status.phase"),
        ("READY", "status.ready"),
        ("STEP", "status.currentCheckpoint.step"),
        ("ENDPOINT", "status.endpoint"),
    ),
    "EnginePool": (
        ("PHASE", "status.phase"),
        ("DESIRED", "spec.replicas"),
        ("READY", "status.readyReplicas"),
        ("UPDATED", "status.updatedReplicas"),
    ),
    "Pod": (
        ("READY", "status.conditions[Ready]"),
        ("STATUS", "status.phase"),
        ("IP", "status.podIP"),
        ("REASON", "status.containerStatuses.0.state.terminated.reason"),
    ),
    "Service": (("CLUSTER-IP", "spec.clusterIP"), ("PORT", "spec.ports.0.port")),
    "Node": (
        ("READY", "status.conditions[Ready]"),
        ("GPUS", "status.allocatable.nvidia~1com/gpu"),
        ("CPUS", "status.allocatable.cpu"),
        ("MEMORY", "status.allocatable.memory"),
    ),
    "PersistentVolumeClaim": (("STATUS", "status.phase"), ("FOLDER", "metadata.annotations.stoker~1dev/local-folder")),
    "Event": (("TYPE", "type"), ("REASON", "reason"), ("OBJECT", "involvedObject.name"), ("MESSAGE", "message")),
}

WIDE: dict[str, tuple[Column, ...]] = {
    "TrainingJob": (
        ("RANKS", "status.worldSize"),
        ("TOKENS/S", "status.progress.tokensPerSecond"),
        ("ETA S", "status.progress.etaSeconds"),
        ("LOST", "status.lostSteps"),
        ("ATTEMPT", "status.attempt.number"),
    ),
    "Checkpoint": (("FOLDER", "status.folder"), ("DIGEST", "status.digest"), ("PINNED", "spec.pinned")),
    "InferenceDeployment": (("CHECKPOINT", "status.currentCheckpoint.name"), ("REVISION", "status.currentRevision")),
    "EnginePool": (("ROLE", "spec.revisions.0.template.role"),),
    "Pod": (("NODE", "spec.nodeName"), ("ATTEMPT", "metadata.labels.stoker~1dev/attempt")),
    "Service": (("TYPE", "spec.type"),),
    "Event": (("COUNT", "count"),),
}
"""Columns that `-o wide` adds."""

GOOD = {"TrainingJob": ("Completed",), "Checkpoint": ("Complete",), "InferenceDeployment": ("Serving", "ScaledToZero")}
BAD = {
    "TrainingJob": ("Failed", "Cancelled"),
    "Checkpoint": ("Corrupt", "Failed", "Deleted"),
    "InferenceDeployment": ("Failed",),
}
FOLLOWED = ("TrainingJob", "Checkpoint", "InferenceDeployment")
"""Kinds whose progress is shown."""


def value_at(found: Object, path: str) -> str:
    """Look up the text at a dotted path: list items by number, conditions by type in brackets; empty when absent."""
    value: Any = found
    for part in re.findall(r"[^.\[\]]+|\[[^\]]+\]", path):
        if part.startswith("["):
            kinds = {condition["type"]: condition["status"] for condition in value or ()}
            value = kinds.get(part[1:-1])
        elif isinstance(value, list):
            value = value[int(part)] if int(part) < len(value) else None
        else:
            value = (value or {}).get(part.replace("~1", "."))
        if value is None:
            return ""
    return str(value)


def table(
    kind: str, items: Sequence[Object], now: datetime, *, wide: bool = False, namespaced: bool = False
) -> list[list[str]]:
    """Build the header and the rows of `get`; `wide` adds columns, `namespaced` the namespace."""
    columns = (*COLUMNS.get(kind, ()), *(WIDE.get(kind, ()) if wide else ()))
    has_message = kind in (*FOLLOWED, "EnginePool")
    header = ["NAME", *(name for name, _ in columns), "AGE", *(["MESSAGE"] if has_message else [])]
    rows = [["NAMESPACE", *header] if namespaced else header]
    for item in items:
        metadata = item["metadata"]
        values = [_one_line(value_at(item, path)) for _, path in columns]
        message = [_one_line(value_at(item, "status.message"))] if has_message else []
        row = [metadata["name"], *values, age(metadata.get("creationTimestamp") or "", now), *message]
        rows.append([metadata.get("namespace", ""), *row] if namespaced else row)
    return rows


def colour_of(found: Object) -> str:
    """The key of `text_style.COLOURS` for an object that has a phase; empty for others."""
    if not value_at(found, "status.phase"):
        return ""
    if found["kind"] == "Pod":
        return {"Running": "good", "Succeeded": "good", "Failed": "bad"}.get(value_at(found, "status.phase"), "going")
    return (state_of(found) or "going") if found["kind"] in FOLLOWED else ""


def _one_line(text: str) -> str:
    """A cell: a line break in a message would break the table."""
    return " ".join(text.split())


def age(timestamp: str, now: datetime) -> str:
    """Format the time since a timestamp as `42s`, `7m`, `3h` or `5d`."""
    if not timestamp:
        return ""
    seconds = int((now - datetime.fromisoformat(timestamp)).total_seconds())
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"


def state_of(found: Object) -> str:
    """Classify an object: `good`, `bad`, or empty while it is under way or its status is of an earlier generation."""
    kind, status = found["kind"], found.get("status") or {}
    if kind not in FOLLOWED:
        return "good"
    if status.get("observedGeneration", 0) < found["metadata"].get("generation", 0):
        return ""
    if status.get("phase") in BAD[kind] or value_at(found, "status.conditions[Stalled]") == "True":
        return "bad"
    drains = status.get("phase") == "ScaledToZero" and value_at(found, "status.conditions[Reconciling]") == "True"
    return "good" if status.get("phase") in GOOD[kind] and not drains else ""


def progress_line(found: Object) -> str:
    """Summarise the progress of an object in one line."""
    parts = _JOB if found["kind"] == "TrainingJob" else _CHECKPOINT if found["kind"] == "Checkpoint" else _DEPLOYMENT
    said = [part(found) for part in parts]
    return "  ".join(text for text in said if text)


def described(found: Object, events: Sequence[Object], now: datetime) -> str:
    """Build the page of `describe`: identity, conditions, status, spec, other fields, events."""
    metadata = found["metadata"]
    status = {name: value for name, value in (found.get("status") or {}).items() if name != "conditions"}
    lines = [
        f"{found['kind']} {'/'.join(filter(None, (metadata.get('namespace'), metadata['name'])))}",
        f"uid {metadata.get('uid', '')}, generation {metadata.get('generation', 1)}, "
        f"age {age(metadata.get('creationTimestamp') or '', now)}",
    ]
    if metadata.get("deletionTimestamp"):
        lines.append(f"being deleted since {metadata['deletionTimestamp']}, held by {metadata.get('finalizers')}")
    lines += _block("Labels", metadata.get("labels")) + _conditions(found)
    for title in ("status", "spec", "data"):
        lines += _block(title.capitalize(), status if title == "status" else found.get(title))
    lines += _block("Fields", {name: value for name, value in found.items() if name not in _SECTIONS and value})
    return "\n".join(lines if found["kind"] == "Event" else lines + _events(events, now))


_SECTIONS = ("apiVersion", "kind", "metadata", "status", "spec", "data")
"""Parts of an object with a place of their own on its page. Others are fields of kinds such as Event."""


def bytes_text(count: float) -> str:
    """Format bytes as `1.2 GB`, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _block(title: str, value: Any) -> list[str]:
    if not value:
        return []
    from stoker.cli.manifest_yaml import written  # only `describe` needs it

    plain = json.loads(json.dumps(value))
    if title == "Status":
        _hide(plain, "pinned")
        _hide(plain.get("router"), "rendered")
    return [f"{title}:", *(f"  {line}" for line in written(plain).splitlines())]


def _hide(section: Any, field: str) -> None:
    """Shorten a field that only the operator uses."""
    if isinstance(section, dict) and field in section:
        section[field] = "..."


def _conditions(found: Object) -> list[str]:
    conditions = (found.get("status") or {}).get("conditions") or ()
    rows = [[c["type"], c["status"], c.get("reason", ""), c.get("message", "")] for c in conditions]
    if not rows:
        return []
    return ["Conditions:", *(f"  {line}" for line in aligned(rows).splitlines())]


_EVENT = ("type", "reason", "message")
"""What a line tells of an event; any may be missing."""


def _age_of_event(event: Object, now: datetime) -> str:
    time = time_of(event)
    return age(f"{time}+00:00" if time else "", now)


def _events(events: Sequence[Object], now: datetime) -> list[str]:
    rows = [[_age_of_event(e, now), *(_one_line(e.get(part) or "") for part in _EVENT)] for e in events]
    if not rows:
        return ["Events: none"]
    return ["Events:", *(f"  {line}" for line in aligned(rows).splitlines())]


Part = Callable[[Object], str]


def _number(path: str, text: str) -> Part:
    def part(found: Object) -> str:
        value = value_at(found, path)
        return text.format(value) if value else ""

    return part


def _step(found: Object) -> str:
    step, of = value_at(found, "status.progress.step"), value_at(found, "status.progress.totalSteps")
    return f"step {step}/{of}" if step and of else f"step {step}" if step else ""


def _eta(found: Object) -> str:
    seconds = value_at(found, "status.progress.etaSeconds")
    return f"{seconds} s left" if seconds and seconds != "0" else ""


def _size(found: Object) -> str:
    size = value_at(found, "status.bytes")
    return bytes_text(float(size)) if size else ""


def _verified(found: Object) -> str:
    return "verified" if value_at(found, "status.conditions[Verified]") == "True" else ""


_MESSAGE = _number("status.message", "{}")
_JOB: tuple[Part, ...] = (
    _step,
    _number("status.progress.loss", "loss {}"),
    _number("status.progress.validationLoss", "validation {}"),
    _number("status.progress.tokensPerSecond", "{} tokens/s"),
    _eta,
    _MESSAGE,
)
_CHECKPOINT: tuple[Part, ...] = (
    _number("status.step", "step {}"),
    _number("status.loss", "loss {}"),
    _size,
    _verified,
    _MESSAGE,
)
_DEPLOYMENT: tuple[Part, ...] = (
    _number("status.ready", "{} ready"),
    _number("status.currentCheckpoint.step", "step {}"),
    _MESSAGE,
)


def utc_now() -> datetime:
    return datetime.now(UTC)
