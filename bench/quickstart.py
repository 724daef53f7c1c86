"""Wall time of `make quickstart` by phase, after set-up.

Runs `examples/quickstart/run.py` as it is; that script cleans up at its end (`CI=1`). The model must be there (`make
model`).

    python bench/quickstart.py

The last line is JSON.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOAL_S = 300


def main() -> int:
    begin = time.monotonic()
    lines = []
    command = [sys.executable, str(ROOT / "examples/quickstart/run.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "CI": "1"}
    ) as quickstart:
        assert quickstart.stdout is not None
        for line in quickstart.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    seconds = round(time.monotonic() - begin, 1)
    result = {
        "bench": "quickstart",
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "phases_s": phases("".join(lines)),
        "total_s": seconds,
        "taught": quickstart.returncode == 0,
        "goal_met": quickstart.returncode == 0 and seconds <= GOAL_S,
    }
    print(f"{seconds} s in all (goal {GOAL_S} s)")
    print(json.dumps(result))
    return quickstart.returncode


def phases(text: str) -> dict[str, float]:
    """Parse the phases of the line `seconds: PHASE 12, PHASE 3, ..., in all 123`."""
    found = re.search(r"^seconds: (.*), in all \d+$", text, flags=re.MULTILINE)
    if found is None:
        return {}
    parts = re.findall(r"(.+?) (\d+)(?:, |$)", found[1])
    return {name: float(value) for name, value in parts}


if __name__ == "__main__":
    sys.exit(main())
