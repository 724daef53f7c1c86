"""Memory of a process whose steps have ever new sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.engine.execution.kernel_cache import VARIABLES

PROGRAM = """
import sys
from pathlib import Path
import torch
if sys.argv[1] == "bounded":
    from stoker.engine.execution.kernel_cache import bound_kernel_caches
    bound_kernel_caches()
torch.set_num_threads(1)
anonymous_kib = lambda: int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])
weight = torch.randn(192, 64, dtype=torch.bfloat16)
with torch.inference_mode():
    torch.nn.functional.linear(torch.randn(1, 64, dtype=torch.bfloat16), weight)
    before_kib = anonymous_kib()
    for rows in range(2, 800):
        torch.nn.functional.linear(torch.randn(rows, 64, dtype=torch.bfloat16), weight)
print((anonymous_kib() - before_kib) / 1024)
"""


def grown_mib(mode: str) -> float:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    command = [sys.executable, "-c", PROGRAM, mode]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    return float(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' /proc")
def test_compiled_kernels_are_bounded() -> None:
    assert grown_mib("bounded") < 300  # without bounds 590 MB, where the CPU multiplies bfloat16 with oneDNN
