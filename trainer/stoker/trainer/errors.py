"""The trainer's own errors, in one tree.

    TrainerError
    ├── DataError        the corpus cannot be used
    ├── ModelUnusable    the starting weights cannot be used
    ├── OtherModel       the checkpoint to resume from is of another model
    ├── StorageFailed    a save, a remote source of data or a target of metrics could not be written or read
    ├── NonFinite        loss or gradient norm is not finite
    ├── LossSpiked       the loss is far above those before it, and the run goes on without its samples
    ├── StateDiverged    ranks that hold the same state do not
    └── ChannelError     a line between agent and rank is not part of the protocol

Beside them the trainer raises `ConfigError` (stoker.pod) and the errors of `stoker.checkpoint`.
`protocol/error_causes.py` gives each error its cause in the termination message.
"""

from __future__ import annotations


class TrainerError(Exception):
    """The base of the trainer's own errors."""


class DataError(TrainerError):
    """The corpus is missing, empty, unreadable, or not the one of the checkpoint. The message names file and line."""


class ModelUnusable(TrainerError):
    """The starting weights are missing, damaged, or not those of the model."""


class OtherModel(TrainerError):
    """The checkpoint is sound, but its tensors are not those of the model."""


class StorageFailed(TrainerError):
    """A save, state in a file, remote data or a target of metrics cannot be written or read.

    The message names the place and the reason.
    """


class NonFinite(TrainerError):
    """Loss or gradient norm is infinite or not a number; the weights are still those before the step."""


class LossSpiked(TrainerError):
    """The loss is far above those before it; the weights are still those before the step."""


class StateDiverged(TrainerError):
    """Ranks that hold the same state have different bits; the message names them."""


class ChannelError(TrainerError):
    """A line on the channel that is not part of the protocol."""
