"""Why a program ended: one table of causes and exit codes, written by the data plane and read by the operator (docs/exit-codes.md)."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """The reason in a program's last word; each has one exit code."""

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
    STORAGE_ERROR = "StorageError"
    PEER_LOST = "PeerLost"
    TASK_FAILED = "TaskFailed"
    INTERNAL = "Internal"


EXIT_CODES: dict[Cause, int] = {
    Cause.COMPLETED: 0,
    Cause.CONFIG_INVALID: 64,  # the configuration or the command line is wrong: retrying cannot help
    Cause.DATA_ERROR: 65,  # the corpus is missing, empty, unreadable or not the one of the checkpoint
    Cause.MODEL_ERROR: 66,  # the model's weights or configuration cannot be loaded
    Cause.CHECKPOINT_CORRUPT: 67,  # the checkpoint to resume from (or to serve) fails verification
    Cause.STORAGE_ERROR: 68,  # a save could not be written (full disk, lost mount)
    Cause.OUT_OF_MEMORY: 69,
    Cause.HANG: 71,  # no progress before the deadline of the phase
    Cause.RANK_FAILED: 72,  # a rank raised
    Cause.RANK_KILLED: 73,  # a rank died by a signal
    Cause.PEER_LOST: 74,  # a rank of another pod is gone
    Cause.NON_FINITE: 75,  # loss or gradient norm is not finite
    Cause.TASK_FAILED: 76,  # a task pod (verify, inspect, import, delete, list) says no
    Cause.INTERNAL: 77,
    Cause.INTERRUPTED: 78,  # stopped on SIGTERM or drain; `saves` says what is durable
    Cause.CANCELLED: 79,  # stopped for good on request after a last save
}

CAUSES: dict[int, Cause] = {code: cause for cause, code in EXIT_CODES.items()}
