"""The token cache: the error when it cannot be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stoker.pod.causes import Cause
from stoker.trainer.rank.data.cache import cache_lock
from stoker.trainer.rank.main import cause_of


def test_a_full_cache_is_named(tmp_path: Path) -> None:
    """The error of a write to an open file lacks the file's name."""
    with pytest.raises(OSError, match=str(tmp_path)) as failure, cache_lock(tmp_path, lambda _: None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert cause_of(failure.value) == Cause.STORAGE_ERROR
