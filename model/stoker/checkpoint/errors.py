"""Exceptions of the checkpoint format, raised by this package and caught by its callers.

CheckpointError (a ValueError)
├── CheckpointMissing   nothing is there: no folder, no manifest, no such tensor
├── CheckpointCorrupt   what is there is not what was written, or was never a valid checkpoint
├── CheckpointExists    the name is published already, and names are published once
├── CheckpointLocked    another run holds the folder
├── CheckpointInUse     it is being read, so retention leaves it alone
└── StorageUnusable     the way to the storage is not known, so nothing is known of what is there

Failures of the disk itself (full, lost mount, no permission) stay OSError and carry the path. So do credentials that
cannot be read.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be written, read or removed; the message names the field, the value and what is allowed."""


class CheckpointMissing(CheckpointError):
    """A checkpoint, manifest or tensor of that name does not exist."""


class CheckpointCorrupt(CheckpointError):
    """The bytes are not those that were written, or a manifest holds something impossible."""


class CheckpointExists(CheckpointError):
    """A published checkpoint has that name; it is never replaced."""


class CheckpointLocked(CheckpointError):
    """Another process holds the lock of the checkpoint root."""


class CheckpointInUse(CheckpointError):
    """The checkpoint is being read; retention does not delete it."""


class StorageUnusable(CheckpointError):
    """The configuration names no storage, or its client is not installed. No checkpoint is to blame for it."""
