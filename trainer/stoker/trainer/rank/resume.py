"""The choice of the checkpoint that a run resumes from.

Called once at the start by the rank's `main`, on every rank (collective). Reads the checkpoint root and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stoker.checkpoint.errors import CheckpointCorrupt, CheckpointMissing
from stoker.checkpoint.store import Broken, CheckpointRoot, Found
from stoker.checkpoint.verify import verify
from stoker.trainer.protocol.config import TrainerConfig
from stoker.trainer.rank.save_group import SaveGroup


@dataclass(frozen=True)
class ResumePoint:
    """A committed checkpoint of this run."""

    folder: str
    digest: str
    verified: bool
    """This process has read it whole and found it good."""

    def path(self, root: CheckpointRoot) -> Path:
        return Path(root.root) / self.folder


def choose_resume(
    config: TrainerConfig, root: CheckpointRoot, group: SaveGroup, report: Callable[[str], None]
) -> ResumePoint | None:
    """The configured checkpoint, or without an operator the newest that verifies; None for a fresh run (collective).

    Raises:
        CheckpointCorrupt: without an operator, when there are checkpoints and none of them verifies.
        OSError: the newest one, or one after it that verifies, cannot be read. It may be as good as ever: a run that
            passed over it would train its steps again, or begin at step 0.
    """
    if config.resume is not None:
        return ResumePoint(config.resume.folder, config.resume.digest, verified=False)
    if config.retention == "external":
        return None
    answer = _newest_verified(root, report) if group.rank == 0 else None
    folder, digest, problems = group.broadcast(answer)
    if folder is not None:
        return ResumePoint(folder, digest, verified=True)
    if problems:
        raise CheckpointCorrupt(f"{root.root}: no checkpoint verifies: {'; '.join(problems)}")
    return None


def _newest_verified(root: CheckpointRoot, report: Callable[[str], None]) -> tuple[str | None, str, list[str]]:
    problems: list[str] = []
    for item in root.scan():
        problem = _problem_of(item, report)
        if problem is None and isinstance(item, Found):
            return item.folder_name, item.digest, problems
        if problem is not None:
            problems.append(problem)
            report(f"CheckpointCorrupt step {item.step}, using the one before: {problem}")
    return None, "", problems


def _problem_of(item: Found | Broken, report: Callable[[str], None]) -> str | None:
    """Return what is wrong with a checkpoint; None for one that verifies, and for a folder that never was one."""
    if isinstance(item, Found):
        report(f"VerifyingCheckpoint step {item.step}")
        found = verify(item.path, item.digest)
        return None if found.ok else found.problems[0]
    if isinstance(item.error, OSError):
        raise _unread(item.error) from item.error
    return None if isinstance(item.error, CheckpointMissing) else item.problem


def _unread(error: OSError) -> OSError:
    text = f"{error.strerror}; a run goes on from its newest checkpoint: make it readable, or move its folder away"
    return OSError(error.errno, text, error.filename)
