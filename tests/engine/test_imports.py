"""What a core imports before it loads a model: each second there is one of every start."""

from __future__ import annotations

import subprocess
import sys

import pytest

NOT_AT_START = ("gguf", "httpx", "transformers", "fastapi", "uvicorn", "sympy", "torch._dynamo", "torch._inductor")


@pytest.mark.parametrize("module", ["stoker.engine.core.main", "stoker.engine.worker_main"])
def test_a_core_imports_nothing_that_only_some_models_need(module: str) -> None:
    program = f"import sys, {module}; print(*sorted(set({NOT_AT_START!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
