"""The choice of the checkpoint that a run resumes from.

Called once at the start by the rank's `main`, on every rank (collective). Reads the checkpoint root and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stoker.checkpoint.errors import CheckpointCorrupt
from stoker.checkpoint.store import CheckpointRoot
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
    for item in root.committed():
        report(f"VerifyingCheckpoint step {item.step}")
        found = verify(item.path, item.digest)
        if found.ok:
            return item.folder_name, item.digest, problems
        problems.append(found.problems[0])
        report(f"CheckpointCorrupt step {item.step}, using the one before: {found.problems[0]}")
    return None, "", problems
