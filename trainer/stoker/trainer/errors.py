"""The errors of the trainer and the cause that each has in the termination message.

    TrainerError
    ├── DataError        the corpus cannot be used
    ├── ModelUnusable    the starting weights cannot be used
    ├── OtherModel       the checkpoint to resume from is of another model
    ├── StorageFailed    a save could not be written, or does not read back
    ├── NonFinite        loss or gradient norm is not finite
    └── ChannelError     a line between agent and rank is not part of the protocol

Beside them the trainer raises `ConfigError` (stoker.pod) and the errors of `stoker.checkpoint`.
"""

from __future__ import annotations

from stoker.checkpoint.errors import CheckpointError, CheckpointLocked
from stoker.pod.causes import Cause, CauseRule, is_explained
from stoker.pod.config_file import ConfigError


class TrainerError(Exception):
    """The base of the trainer's own errors."""


class DataError(TrainerError):
    """The corpus is missing, empty, unreadable, or not the one of the checkpoint. The message names file and line."""


class ModelUnusable(TrainerError):
    """The starting weights are missing, damaged, or not those of the model."""


class OtherModel(TrainerError):
    """The checkpoint is sound, but its tensors are not those of the model."""


class StorageFailed(TrainerError):
    """A save could not be written or does not read back; the message names the place and the reason."""


class NonFinite(TrainerError):
    """Loss or gradient norm is infinite or not a number; the weights are still those before the step."""


class ChannelError(TrainerError):
    """A line on the channel that is not part of the protocol."""


def _names_a_file(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.filename is not None


ERROR_CAUSES: tuple[CauseRule, ...] = (
    CauseRule(ConfigError, Cause.CONFIG_INVALID),
    CauseRule(DataError, Cause.DATA_ERROR),
    CauseRule(ModelUnusable, Cause.MODEL_ERROR),
    CauseRule(OtherModel, Cause.MODEL_ERROR),  # not CheckpointCorrupt: an older checkpoint would not fit either
    CauseRule(CheckpointLocked, Cause.CONFIG_INVALID),  # another run without an operator writes there
    CauseRule(CheckpointError, Cause.CHECKPOINT_CORRUPT),
    CauseRule(StorageFailed, Cause.STORAGE_ERROR),
    CauseRule(NonFinite, Cause.NON_FINITE),
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
