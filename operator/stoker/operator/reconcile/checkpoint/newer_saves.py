"""The newer saves of a Checkpoint's job, which a task verifies first where `checkpoint.maxToKeep` is set. Pure.

Once that many of them are verified, the job's retention gives this save up, and to verify it would have been in vain.
Called by `reconcile` before a task begins.
"""

from __future__ import annotations

from collections.abc import Iterator

from stoker.operator.domain.retention import takes_place
from stoker.operator.reconcile.checkpoint.view import CheckpointView


def waits_for_newer_saves(view: CheckpointView) -> bool:
    """Whether retention gives this save up if the newer ones prove whole. One that is pinned or used is kept anyway."""
    source, status = view.checkpoint.spec.source, view.checkpoint.status
    keep = view.job.spec.checkpoint.max_to_keep if view.job is not None else None
    if keep is None or view.checkpoint.spec.pinned or view.users or source.import_:
        return False
    step = status.step or 0
    newer = {folder for folder, at in (*_recorded(view), *_announced(view)) if at > step}
    return len(newer) >= max(keep, 1)


def _recorded(view: CheckpointView) -> Iterator[tuple[str, int]]:
    """Folder and step of the saves that have a Checkpoint and take a place of `maxToKeep`."""
    for found in view.siblings:
        save = found["spec"]["source"].get("save") or found.get("status") or {}
        if save.get("folder") and takes_place(found):
            yield str(save["folder"]), int(save.get("step") or 0)


def _announced(view: CheckpointView) -> Iterator[tuple[str, int]]:
    """Folder and step of verified saves that will have a Checkpoint once older ones are listed."""
    attempt = view.job.status.attempt if view.job is not None else None
    if attempt is None:
        return
    done = -1 if attempt.announced_step is None else attempt.announced_step
    for save in view.saves:
        if save.verified and save.step > done and save.folder.endswith(f".{attempt.writer}"):
            yield save.folder, save.step
