"""The one table of causes of a program's end: exit code, action of the operator, rank among root causes.

Trainer, engine, router, command line and operator read it; docs/exit-codes.md shows it. To add a cause, add a member
and a row.

Constant; no program adds a cause at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """The cause in a program's termination message; each has one exit code."""

    COMPLETED = "Completed"
    INTERRUPTED = "Interrupted"
    CANCELLED = "Cancelled"
    CONFIG_INVALID = "ConfigInvalid"
    DATA_ERROR = "DataError"
    CHECKPOINT_CORRUPT = "CheckpointCorrupt"
    MODEL_ERROR = "ModelError"
    OUT_OF_MEMORY = "OutOfMemory"
    HANG = "Hang"
    RANK_FAILED = "RankFailed"
    RANK_KILLED = "RankKilled"
    NON_FINITE = "NonFinite"
    LOSS_SPIKED = "LossSpiked"
    STATE_DIVERGED = "StateDiverged"
    STORAGE_ERROR = "StorageError"
    PEER_LOST = "PeerLost"
    TASK_FAILED = "TaskFailed"
    INTERNAL = "Internal"


class Action(StrEnum):
    """The operator's reaction to the end of an attempt."""

    COMPLETE = "Complete"
    RETRY = "Retry"
    """Start a new attempt from the newest verified checkpoint; it counts against the budget."""
    RETRY_FREE = "RetryFree"
    """The same without counting: the job did not fail, something outside of it stopped it."""
    RESUME_OLDER = "ResumeOlder"
    """Mark the checkpoint that was resumed Corrupt; start a new attempt from the one before it."""
    CANCEL = "Cancel"
    FAIL = "Fail"
    """End the job: a retry cannot help."""


@dataclass(frozen=True)
class CauseRow:
    """One cause and everything that is decided by it."""

    cause: Cause
    exit_code: int
    action: Action
    explained: bool
    """The error's message is enough; a stack in the log would add nothing."""
    meaning: str
    """The text of docs/exit-codes.md."""


CAUSES: tuple[CauseRow, ...] = (
    CauseRow(Cause.OUT_OF_MEMORY, 69, Action.RETRY, True, "a rank, or the whole pod, ran out of memory"),
    CauseRow(Cause.RANK_KILLED, 73, Action.RETRY, True, "a process died by a signal"),
    CauseRow(Cause.STATE_DIVERGED, 70, Action.RETRY, True, "ranks that hold the same state have different bits"),
    CauseRow(Cause.NON_FINITE, 75, Action.RETRY, True, "loss or gradient norm is not finite"),
    CauseRow(
        *(Cause.LOSS_SPIKED, 80, Action.RETRY, True),
        "the loss spiked; the next attempt leaves out the samples of that step",
    ),
    CauseRow(Cause.CONFIG_INVALID, 64, Action.FAIL, True, "the configuration or the command line is wrong"),
    CauseRow(
        *(Cause.MODEL_ERROR, 66, Action.FAIL, True),
        "weights or model configuration cannot be loaded, or the checkpoint to resume from is of another model",
    ),
    CauseRow(
        *(Cause.CHECKPOINT_CORRUPT, 67, Action.RESUME_OLDER, True),
        "the checkpoint to resume from (or to serve) fails verification",
    ),
    CauseRow(
        *(Cause.DATA_ERROR, 65, Action.FAIL, True),
        "the corpus is missing, empty, unreadable, or not the one of the checkpoint",
    ),
    CauseRow(
        Cause.STORAGE_ERROR,
        68,
        Action.RETRY,
        True,
        "a save, the token cache, the log or standard output could not be written",
    ),
    CauseRow(Cause.INTERNAL, 77, Action.RETRY, False, "a defect of Stoker, or an exit code that is not in this table"),
    CauseRow(
        Cause.TASK_FAILED, 76, Action.FAIL, True, "a task (verify, inspect, import, delete, list) found a problem"
    ),
    CauseRow(
        *(Cause.HANG, 71, Action.RETRY, True),
        "no progress before the deadline of the phase; the stacks of all ranks are in the log",
    ),
    CauseRow(Cause.RANK_FAILED, 72, Action.RETRY, False, "a rank raised an error that no other cause describes"),
    CauseRow(Cause.CANCELLED, 79, Action.CANCEL, True, "stopped for good on request, after a last save"),
    CauseRow(
        Cause.INTERRUPTED, 78, Action.RETRY_FREE, True, "stopped by SIGTERM or a drain; `saves` lists what is kept"
    ),
    CauseRow(Cause.PEER_LOST, 74, Action.RETRY, True, "a rank of another pod stopped answering"),
    CauseRow(Cause.COMPLETED, 0, Action.COMPLETE, True, "all steps are done, the last save was read back"),
)
"""Root causes first. When several ranks or pods end, the one that stands first here explains the others.

* A lost peer is only ever a consequence, so it explains less than anything that another rank reports, and less than a
  stop: ranks that end on request leave peers behind that have not ended yet.
* A hang and an unnamed error are observations of this kind too (a killed peer makes others hang or raise), so every
  named cause comes before them. A hang brings stacks and comes before the unnamed error.
"""

ORDERLY_ENDS = (Cause.COMPLETED, Cause.INTERRUPTED, Cause.CANCELLED)
"""The program ended as it was asked to: it finished or it was stopped. Nothing failed."""
ROOT_CAUSE_ORDER: tuple[Cause, ...] = tuple(row.cause for row in CAUSES)
EXIT_CODES: dict[Cause, int] = {row.cause: row.exit_code for row in CAUSES}
_ROWS: dict[Cause, CauseRow] = {row.cause: row for row in CAUSES}
_BY_EXIT_CODE: dict[int, Cause] = {row.exit_code: row.cause for row in CAUSES}


def action_after(cause: Cause) -> Action:
    """The operator's reaction to this cause, before the job's budget is considered."""
    return _ROWS[cause].action


def is_explained(cause: Cause) -> bool:
    """Whether the error's message is enough, so that no stack goes to the log."""
    return _ROWS[cause].explained


def cause_of_exit_code(code: int) -> Cause | None:
    """The cause that a program reports with this exit code; None for a code that is not in the table."""
    return _BY_EXIT_CODE.get(code)


def root_cause_rank(cause: Cause) -> int:
    """Position in `ROOT_CAUSE_ORDER`: the smaller, the more the cause explains."""
    return ROOT_CAUSE_ORDER.index(cause)


@dataclass(frozen=True)
class CauseRule:
    """Errors of one kind, or those of them that `applies` accepts, have this cause.

    A program's rules are a list; the first that fits counts.
    """

    kind: type[BaseException]
    cause: Cause
    applies: Callable[[BaseException], bool] = lambda _: True


def cause_of_error(error: BaseException, rules: Sequence[CauseRule], default: Cause) -> Cause:
    """The cause of the first rule that fits an error, else `default`."""
    fitting = (rule.cause for rule in rules if isinstance(error, rule.kind) and rule.applies(error))
    return next(fitting, default)


def mentions(*texts: str) -> Callable[[BaseException], bool]:
    """A condition for `CauseRule`: the error's message contains one of the texts."""
    return lambda error: any(text in str(error) for text in texts)
