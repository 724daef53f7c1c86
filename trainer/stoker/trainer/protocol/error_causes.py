"""The cause that each error of agent and ranks has in the termination message.

A constant table, read where a program ends: by `agent/program` and by `rank/main`.
"""

from __future__ import annotations

from stoker.checkpoint.errors import CheckpointError, CheckpointLocked, StorageUnusable
from stoker.pod.causes import Cause, CauseRule, is_explained
from stoker.pod.config_file import ConfigError
from stoker.trainer.errors import (
    DataError,
    LossSpiked,
    ModelUnusable,
    NonFinite,
    OtherModel,
    StateDiverged,
    StorageFailed,
)


def _names_a_file(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.filename is not None


ERROR_CAUSES: tuple[CauseRule, ...] = (
    CauseRule(ConfigError, Cause.CONFIG_INVALID),
    CauseRule(DataError, Cause.DATA_ERROR),
    CauseRule(ModelUnusable, Cause.MODEL_ERROR),
    CauseRule(OtherModel, Cause.MODEL_ERROR),  # not CheckpointCorrupt: an older checkpoint would not fit either
    CauseRule(CheckpointLocked, Cause.CONFIG_INVALID),  # another run without an operator writes there
    CauseRule(StorageUnusable, Cause.CONFIG_INVALID),  # an older checkpoint would not be found either
    CauseRule(CheckpointError, Cause.CHECKPOINT_CORRUPT),
    CauseRule(StorageFailed, Cause.STORAGE_ERROR),
    CauseRule(NonFinite, Cause.NON_FINITE),
    CauseRule(LossSpiked, Cause.LOSS_SPIKED),
    CauseRule(StateDiverged, Cause.STATE_DIVERGED),
    CauseRule(MemoryError, Cause.OUT_OF_MEMORY),
    CauseRule(OSError, Cause.STORAGE_ERROR, _names_a_file),  # the token cache, the log, a socket
)
"""Causes of errors, for agent and ranks. `rank.main` adds those of torch."""


def describe_error(error: BaseException, cause: Cause) -> str:
    """One text for the termination message: the error's message, with its type where the cause does not explain it."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    text = str(error)
    return text if is_explained(cause) and text else f"{type(error).__name__}: {text}".removesuffix(": ")
