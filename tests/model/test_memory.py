from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_freed_memory_is_kept_where_glibc_is() -> None:
    """The test runs in a process of its own, because the setting lasts."""
    code = (
        "from stoker.model.memory import keep_freed_memory; import platform, sys; "
        "sys.exit(platform.libc_ver()[0] == 'glibc' and not keep_freed_memory())"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
