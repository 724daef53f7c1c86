"""Task pods: work on checkpoints for the operator, which must not open one itself.

Each task is a function from paths to a `result` object. `run` puts it into a termination message, whose cause is
also the exit code:

=============  =========  ======================================================================
cause          exit code  when
=============  =========  ======================================================================
Completed      0          done; for verify and import: everything is right
TaskFailed     76         the checkpoint is damaged, missing, or has another digest
StorageError   68         the disk or the mount failed, so nothing is known; worth another try
ConfigInvalid  64         the command line or the way to the storage is wrong, so nothing is known
=============  =========  ======================================================================

Called by `command` alone. Only `delete_task` changes a checkpoint; the others read.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.checkpoint.bucket_storage import is_bucket_path
from stoker.checkpoint.errors import CheckpointError, StorageUnusable
from stoker.checkpoint.facts import facts_of
from stoker.checkpoint.manifest import Manifest
from stoker.checkpoint.manifest_file import read_manifest
from stoker.checkpoint.place import storage_of
from stoker.checkpoint.store import Broken, CheckpointRoot, Found
from stoker.checkpoint.verify import VerifyReport, verify
from stoker.pod.causes import Cause
from stoker.pod.termination_message import MAX_BYTES, TerminationMessage

MAX_BROKEN = 8
MAX_SHOWN_PROBLEMS = 8
MAX_TEXT = 240
MAX_LAYOUT_BYTES = 400

Result = dict[str, Any]


class TaskRefused(CheckpointError):
    """The task failed for a reason that a retry does not change; `result` has the facts."""

    def __init__(self, detail: str, result: Result) -> None:
        super().__init__(detail)
        self.result = result


@dataclass(frozen=True)
class Target:
    """The checkpoint of a task: a folder below the root (or, without one, a path), and the digest that it must have."""

    root: Path | None
    folder: str
    digest: str | None = None

    @property
    def name(self) -> str:
        """The folder's own name, as results report it."""
        return Path(self.folder).name

    @property
    def path(self) -> Path:
        """Return the folder's path.

        Raises:
            CheckpointError: the folder leaves the root, by its name or through a link.
        """
        if self.root is None:
            return Path(self.folder)
        path = self.root / self.folder
        if is_bucket_path(self.root) and ".." not in path.parts and not Path(self.folder).is_absolute():
            return path
        if Path(self.folder).is_absolute() or not path.resolve().is_relative_to(self.root.resolve()):
            raise CheckpointError(f"folder {self.folder!r} must lie below the root {self.root}")
        return path


def verify_task(target: Target) -> Result:
    """Read every byte and return what `inspect` returns."""
    verdict = _verified(target, "verify")
    return _figures(_manifest(target, "verify")) | verdict


def inspect_task(target: Target) -> Result:
    """Check the manifest, the exact cover of the state and the sizes of the files, without reading data.

    `{task, folder, ok, step, tokens, loss, learning_rate, elapsed_s, layout, digest, bytes, files, pieces, problems}`
    """
    verdict = _verified(target, "inspect", reads_data=False)
    return _figures(_manifest(target, "inspect")) | verdict


def import_task(target: Target) -> Result:
    """Like `verify`, for a folder that is adopted."""
    return _figures(_manifest(target, "import")) | _verified(target, "import")


def delete_task(target: Target) -> Result:
    """Delete and return `{task, folder, deleted, bytes, left}`. Deleting what is gone already succeeds."""
    try:
        if target.digest is None:
            raise CheckpointError("delete needs the recorded digest")
        gone = CheckpointRoot(target.path.parent).delete(target.name, target.digest)
    except StorageUnusable:
        raise
    except CheckpointError as error:
        raise TaskRefused(str(error), {"task": "delete", "folder": target.name, "deleted": []}) from error
    deleted = [target.name] if gone.files else []
    return {
        "task": "delete",
        "folder": target.name,
        "deleted": deleted,
        "bytes": gone.bytes,
        "left": list(gone.left[:8]),
    }


def list_task(root: Path, writer: str | None = None, after_step: int | None = None) -> Result:
    """Return `{task, saves, broken, omitted}`: committed checkpoints (of one writer), oldest first, and broken folders.

    A save is `{folder, step, digest}`. `omitted` newer ones had no room: they follow with the last step of these as
    `after_step`.

    Raises:
        OSError: one of them cannot be read, so that a list without it would deny a save.
    """
    items = [item for item in CheckpointRoot(root).scan() if writer is None or item.folder_name.endswith(f".{writer}")]
    for item in items:
        if isinstance(item, Broken) and isinstance(item.error, OSError):
            raise item.error
    found = [item for item in items if isinstance(item, Found) and (after_step is None or item.step > after_step)]
    saves = [
        {"folder": item.folder_name, "step": item.step, "digest": facts_of(item.manifest).digest}
        for item in reversed(found)
    ]
    broken = [item.folder_name for item in items if isinstance(item, Broken)][:MAX_BROKEN]
    return _fit_list({"task": "list", "saves": saves, "broken": broken, "omitted": 0})


def run(task: Callable[[], Result], name: str, folder: str) -> TerminationMessage:
    """Carry a task out and return its outcome. Never raises for a checkpoint, a disk or a path that is bad."""
    try:
        result = task()
        return TerminationMessage(cause=Cause.COMPLETED, step=result.get("step"), result=result)
    except TaskRefused as refused:
        result = refused.result
        return TerminationMessage(cause=Cause.TASK_FAILED, step=result.get("step"), detail=str(refused), result=result)
    except StorageUnusable as error:
        return _no_verdict(Cause.CONFIG_INVALID, error, name, folder)
    except CheckpointError as error:
        result = {"task": name, "folder": Path(folder).name, "ok": False, "problems": [_shortened(str(error))]}
        return TerminationMessage(cause=Cause.TASK_FAILED, detail=str(error), result=result)
    except OSError as error:
        return _no_verdict(Cause.STORAGE_ERROR, error, name, folder)


def _no_verdict(cause: Cause, error: Exception, task: str, folder: str) -> TerminationMessage:
    """Return the outcome of a task that has learned nothing of its checkpoint."""
    return TerminationMessage(cause=cause, detail=str(error), result={"task": task, "folder": Path(folder).name})


def _manifest(target: Target, task: str) -> Manifest:
    try:
        return read_manifest(target.path, storage_of(target.path), target.digest)
    except StorageUnusable:
        raise
    except CheckpointError as error:
        result = {"task": task, "folder": target.name, "ok": False, "problems": [_shortened(str(error))]}
        raise TaskRefused(str(error), result) from error


def _verified(target: Target, task: str, *, reads_data: bool = True) -> Result:
    report = verify(target.path, target.digest, reads_data=reads_data)
    result = {"task": task, "folder": target.name} | _verdict(report)
    if not report.ok:
        raise TaskRefused(report.problems[0], result)
    return result


def _verdict(report: VerifyReport) -> Result:
    problems = [_shortened(problem) for problem in report.problems[:MAX_SHOWN_PROBLEMS]]
    if len(report.problems) > MAX_SHOWN_PROBLEMS:
        problems.append(f"and {len(report.problems) - MAX_SHOWN_PROBLEMS} more")
    return {
        "ok": report.ok,
        "step": report.step,
        "digest": report.digest,
        "bytes": report.bytes,
        "problems": problems,
    }


def _figures(manifest: Manifest) -> Result:
    """Return the metrics that a Checkpoint object shows."""
    facts = facts_of(manifest)
    return {
        "step": facts.step,
        "writer": facts.writer,
        "tokens": facts.tokens,
        "loss": facts.loss,
        "layout": _small(facts.layout),
        "digest": facts.digest,
        "bytes": facts.bytes,
        "learning_rate": facts.learning_rate,
        "elapsed_s": facts.elapsed_s,
        "files": len(manifest.file_sizes()),
        "pieces": facts.pieces,
    }


def _small(layout: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the layout, or nothing where it would crowd out the rest of the message."""
    return layout if len(json.dumps(dict(layout))) <= MAX_LAYOUT_BYTES else {}


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def _fit_list(result: Result) -> Result:
    """Drop the newest saves until the termination message fits its limit."""
    saves, fixed = result["saves"], len(_json(result | {"saves": []}))
    ends = itertools.accumulate((len(_json(save)) + 1 for save in saves), initial=fixed)
    fitting = max(sum(end <= MAX_BYTES - 256 for end in ends) - 1, 0)
    return result | {"saves": saves[:fitting], "omitted": len(saves) - fitting}


def _json(value: Result) -> str:
    return json.dumps(value, separators=(",", ":"))
