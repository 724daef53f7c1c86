"""The termination message: JSON of at most 4 KB that a program writes for the operator before it ends.

Programs write it once, at their end; the operator parses it from the pod's status (`domain/pods`). It owns the format,
not the causes (`causes`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker.pod.causes import Cause

MAX_BYTES = 4096
MAX_SAVES = 8


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """One save, reported to the operator. `verified` is None until the read-back has ended."""

    id: str
    """Request id (the Checkpoint object's uid) or the folder's name for saves by interval."""
    folder: str
    """Folder name below the checkpoint root, e.g. `step-00001200.1a2b3c4d`."""
    step: int
    digest: str
    verified: bool | None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """tokens, loss, layout, ... with the names of `/status`; old saves lose them when the message is too long."""


@dataclass(frozen=True, kw_only=True)
class TerminationMessage:
    """`{cause, step, rank, detail, saves, saves_omitted, result}`.

    `result` is the result of a task pod, and of a trainer the numbers of its last step with the names of `/status`.
    """

    cause: Cause
    step: int | None = None
    rank: int | None = None
    detail: str = ""
    saves: tuple[SaveReport, ...] = ()
    saves_omitted: int = 0
    """Saves older than those of `saves`, which had no room."""
    result: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """JSON of at most `MAX_BYTES`.

        What does not fit is dropped: metrics of old saves, the end of the detail, old saves.
        """
        message = _without_old_figures(_without_old_saves(self, MAX_SAVES))
        encoded = _json(message)
        if len(encoded) > MAX_BYTES:
            detail = message.detail.encode(errors="replace")
            room = len(detail) - (len(encoded) - MAX_BYTES) - 16
            message = replace(message, detail=detail[: max(room, 0)].decode(errors="ignore") + "...")
            encoded = _json(message)
        while len(encoded) > MAX_BYTES and message.saves:
            message = _without_old_saves(message, len(message.saves) - 1)
            encoded = _json(message)
        if len(encoded) > MAX_BYTES:
            raise ValueError(
                f"the result in the termination message takes {len(encoded)} bytes, {MAX_BYTES} are allowed"
            )
        return encoded

    def write(self, path: Path | str) -> None:
        """Replace the file's content in one write.

        In a pod the file exists already and cannot be replaced by renaming.
        """
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.write(handle, self.encode())
        finally:
            os.close(handle)


def parse_termination_message(text: str) -> TerminationMessage | None:
    """Parse a termination message; None for text that is not one (foreign, cut short, empty)."""
    try:
        raw = json.loads(text)
        return TerminationMessage(
            cause=Cause(raw["cause"]),
            step=_integer(raw.get("step")),
            rank=_integer(raw.get("rank")),
            detail=str(raw.get("detail", "")),
            saves=tuple(_save(save) for save in raw.get("saves", ())),
            saves_omitted=_integer(raw.get("saves_omitted")) or 0,
            result=dict(raw.get("result") or {}),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _save(raw: Mapping[str, Any]) -> SaveReport:
    """Read one save. Pods of earlier versions name its metrics `figures`."""
    save = SaveReport(**{"metrics" if name == "figures" else name: value for name, value in dict(raw).items()})
    texts = (save.id, save.folder, save.digest)
    if not all(isinstance(text, str) for text in texts) or type(save.step) is not int:
        raise TypeError("a save needs text for id, folder and digest, and an integer for step")
    if not isinstance(save.metrics, dict) or not all(isinstance(x, int | float | dict) for x in save.metrics.values()):
        raise TypeError("metrics must be numbers and objects of numbers")
    if save.verified is not None and type(save.verified) is not bool:
        raise TypeError("verified must be true, false or null")
    return save


def _integer(value: object) -> int | None:
    if value is None or type(value) is int:
        return value
    raise TypeError("an integer or null is needed")


def _without_old_saves(message: TerminationMessage, most: int) -> TerminationMessage:
    """The message with at most the `most` newest saves."""
    dropped = max(len(message.saves) - most, 0)
    return replace(message, saves=message.saves[dropped:], saves_omitted=message.saves_omitted + dropped)


def _without_old_figures(message: TerminationMessage) -> TerminationMessage:
    """The message without the metrics of as many old saves as necessary."""
    for index, save in enumerate(message.saves):
        if len(_json(message)) <= MAX_BYTES:
            break
        saves = (*message.saves[:index], replace(save, metrics={}), *message.saves[index + 1 :])
        message = replace(message, saves=saves)
    return message


def _json(message: TerminationMessage) -> bytes:
    return json.dumps(asdict(message), separators=(",", ":")).encode()
