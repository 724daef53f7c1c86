"""The storage that a path belongs to: a file system, or a bucket (`s3://bucket/prefix`)."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.checkpoint.bucket_access import access_of
from stoker.checkpoint.bucket_storage import BucketStorage, is_bucket_path
from stoker.checkpoint.errors import StorageUnusable
from stoker.checkpoint.storage import PosixStorage, Storage


def storage_of(path: Path) -> Storage:
    """Return the storage of a checkpoint root, a checkpoint's folder or one of its files.

    Raises:
        StorageUnusable: a URL names no bucket, or the client of buckets is not installed.
        PermissionError: the credentials of a bucket cannot be read.
    """
    if not is_bucket_path(path):
        return PosixStorage()
    if len(path.parts) < 2:
        raise StorageUnusable(f"{path} names no bucket; s3://BUCKET/PREFIX does")
    return BucketStorage(path.parts[1], access_of("/".join(path.parts[1:]), os.environ))


def exists(folder: Path) -> bool:
    """Whether a checkpoint root can be looked into; the objects of a bucket have no folders that could be missing."""
    return is_bucket_path(folder) or folder.is_dir()
