"""The token cache: the errors when it cannot be written, or a source cannot be read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stoker.pod.causes import Cause
from stoker.trainer.errors import DataError
from stoker.trainer.rank.data.cache import cache_lock, content_digest
from stoker.trainer.rank.data.files import LocalFile
from stoker.trainer.rank.main import cause_of


def test_a_full_cache_is_named(tmp_path: Path) -> None:
    """The error of a write to an open file lacks the file's name."""
    with pytest.raises(OSError, match=str(tmp_path)) as failure, cache_lock(tmp_path, lambda _: None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert cause_of(failure.value) == Cause.STORAGE_ERROR


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """This file opens, and its first read fails: address 0 of a process is never mapped."""
    broken = Path("/proc/self/mem")
    with pytest.raises(DataError, match="/proc/self/mem: Input/output error"):
        content_digest([LocalFile(broken)], tmp_path)
    assert list(tmp_path.iterdir()) == []
