"""A process that verifies one folder and prints the result, with its CPU time and memory."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from stoker.checkpoint.verify import verify

if __name__ == "__main__":
    began = time.process_time()
    report = verify(Path(sys.argv[1]))
    peak_kb = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    print(
        json.dumps(
            {
                "ok": report.ok,
                "problems": list(report.problems[:3]),
                "cpu_s": time.process_time() - began,
                "mib": peak_kb / 1024,
            }
        )
    )
