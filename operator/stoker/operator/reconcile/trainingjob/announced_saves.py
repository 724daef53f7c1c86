"""The saves of an attempt, as its leader and the lists of task pods announce them.

The leader's word has room for the newest saves alone: `/status` for 64, the termination message for 8. An operator that
was away for longer has the older ones listed (`omitted_saves`).

Pure. Called by the other modules of this folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stoker.operator.api.trainingjob_status import Attempt
from stoker.operator.domain.pods import ended, exit_of
from stoker.operator.reconcile.trainingjob.listing import listed, listing_of
from stoker.operator.reconcile.trainingjob.view import TrainingView
from stoker.pod.termination_message import TerminationMessage
from stoker.pod.writer import writer_of


@dataclass(frozen=True)
class Save:
    """One durable save, as an attempt announced it."""

    id: str
    folder: str
    step: int
    digest: str
    attempt: int
    verified: bool | None
    reason: str


def announced(view: TrainingView) -> tuple[Save, ...]:
    """Saves of the current attempt, by report, termination messages and the lists of task pods.

    Each folder once; folders of other writers are ignored.
    """
    attempt = view.attempt
    if attempt is None:
        return ()
    writer = writer_of(view.job.metadata.uid, attempt.number)
    by_folder: dict[str, Save] = {}
    for save in (
        *_reported(view, attempt.number),
        *_messages(view, attempt.number),
        *_listed(view, attempt.number, writer),
    ):
        if not save.folder.endswith(f".{writer}"):
            continue
        known = by_folder.setdefault(save.folder, save)
        if known.verified is None:
            by_folder[save.folder] = replace(known, verified=save.verified)
    return tuple(sorted(by_folder.values(), key=lambda save: save.step))


def last_listed_step(view: TrainingView) -> int:
    """Step of the newest save that a task pod has listed; -1 without one."""
    if view.attempt is None:
        return -1
    writer = writer_of(view.job.metadata.uid, view.attempt.number)
    return max((int(raw["step"]) for raw in listed(view, writer)), default=-1)


def omits_saves(view: TrainingView) -> bool:
    """Whether older saves than those of the leader's last word may have no Checkpoint, and are not listed yet."""
    return view.attempt is not None and leaves_gap(view) and not listing_of(view, view.attempt).complete


def leaves_gap(view: TrainingView) -> bool:
    """Whether the leader's last word omits saves between the newest Checkpoint and the oldest save that it names."""
    if view.attempt is None:
        return False
    steps, omitted = _last_word(view, view.attempt)
    done = view.attempt.announced_step
    return omitted > 0 and min(steps, default=math.inf) > (-1 if done is None else done)


def leader_message(view: TrainingView) -> TerminationMessage | None:
    """The last word of the pod whose agent answers for the gang; None while it runs, and where it left none."""
    return exit_of(view.leader).message if view.leader is not None and ended(view.leader) else None


def _last_word(view: TrainingView, attempt: Attempt) -> tuple[list[int], int]:
    """Steps of the saves in the leader's termination message, or before its end in its report; how many it omits."""
    message = leader_message(view)
    if message is not None:
        return [save.step for save in message.saves if save.digest], message.saves_omitted
    steps = [save.step for save in _reported(view, attempt.number)]
    return steps, int((view.report or {}).get("saves_omitted") or 0)


def _reported(view: TrainingView, attempt: int) -> Iterator[Save]:
    for raw in (view.report or {}).get("saves", ()):
        if raw.get("state") == "Committed" and raw.get("digest"):
            yield _save(raw, attempt, str(raw.get("reason") or "interval"))


def _messages(view: TrainingView, attempt: int) -> Iterator[Save]:
    for pod in view.gang:
        message = exit_of(pod).message if ended(pod) else None
        reasons = message.result.get("save_reasons", {}) if message else {}
        for save in message.saves if message else ():
            if save.digest:
                reason = str(reasons.get(save.folder) or "interval")
                yield Save(save.id, save.folder, save.step, save.digest, attempt, save.verified, reason)


def _listed(view: TrainingView, attempt: int, writer: str) -> Iterator[Save]:
    for raw in listed(view, writer):
        yield _save(raw, attempt, "found")


def _save(raw: Mapping[str, Any], attempt: int, reason: str) -> Save:
    verified = raw.get("verified")
    return Save(
        id=str(raw.get("id") or raw["folder"]),
        folder=str(raw["folder"]),
        step=int(raw["step"]),
        digest=str(raw["digest"]),
        attempt=attempt,
        verified=verified if isinstance(verified, bool) else None,
        reason=reason,
    )
