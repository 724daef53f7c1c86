"""What a core imports before it loads a model: each second there is one of every start."""

from __future__ import annotations

import subprocess
import sys

import pytest

NOT_AT_START = ("gguf", "httpx", "transformers", "fastapi", "uvicorn", "sympy", "torch._dynamo", "torch._inductor")


@pytest.mark.parametrize("module", ["stoker.engine.core.run", "stoker.engine.worker_program"])
def test_a_core_imports_nothing_that_only_some_models_need(module: str) -> None:
    program = f"import sys, {module}; print(*sorted(set({NOT_AT_START!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_core_opens_its_gpu_before_it_imports_torch() -> None:
    """So that the driver works beside the imports."""
    program = "import sys, stoker.engine.core.main; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
