"""Programs collect no garbage while they import, and their modules are in no later collection."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from stoker.pod.collection import imports

PROGRAMS = (
    "stoker.checkpoint.__main__",
    "stoker.engine.bench_main",
    "stoker.engine.core.main",
    "stoker.engine.serve_main",
    "stoker.engine.worker_main",
    "stoker.gateway.__main__",
    "stoker.operator.__main__",
    "stoker.operator.service.local.run_supervisor",
    "stoker.router.__main__",
    "stoker.trainer.__main__",
    "stoker.trainer.rank.__main__",
)
HEAVY = ("asyncio", "cryptography", "httpx", "kopf", "numpy", "starlette", "torch")


@pytest.mark.parametrize("error", [None, ImportError])
def test_nothing_is_collected_between_imports_and_what_they_made_is_kept(error: type[Exception] | None) -> None:
    before = gc.get_freeze_count()
    try:
        try:
            with imports():
                assert not gc.isenabled()
                if error is not None:
                    raise error
        except ImportError:
            assert error is ImportError
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_programs_import_what_is_large_after_collections_have_stopped() -> None:
    """Their first modules import none of it."""
    program = f"import sys, {', '.join(PROGRAMS)}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_modules_in_c_report_nothing_as_leaked_at_the_end() -> None:
    program = "from stoker.pod.collection import imports\nwith imports():\n    import triton"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
